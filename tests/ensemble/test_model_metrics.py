"""Publishing without Triton: a stand-in of its metrics notes which thread does what to it, and when."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

TRITON = sys.modules.setdefault("triton_python_backend_utils", types.ModuleType("of Triton's stub"))

from cosytriton_ensemble import metrics  # noqa: E402
from cosytriton_ensemble.errors import (  # noqa: E402
    CancelledError,
    GenerationError,
    InputError,
    QueueFullError,
    RepositoryError,
)
from cosytriton_ensemble.families import COSYVOICE2  # noqa: E402
from cosytriton_ensemble.models import metrics as published  # noqa: E402
from cosytriton_ensemble.models.metrics import Publisher, RequestMetrics  # noqa: E402
from cosytriton_ensemble.pipeline import pipeline_of  # noqa: E402

PIPELINE = pipeline_of(COSYVOICE2)


class Endpoint:
    """What the stand-in shows, and what was done to it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.threads: set[int] = set()
        self.calls = 0
        self.families: set[str] = set()  # that live
        self.orphans: list[str] = []  # metrics that outlived their family

    def touched(self) -> None:
        self.threads.add(threading.get_ident())
        self.calls += 1


class Series:
    def __init__(self, endpoint: Endpoint, family: Any, labels: dict[str, str]) -> None:
        self.endpoint, self.family, self.key = endpoint, family.name, (family.name, *labels.values())
        endpoint.touched()
        endpoint.values[self.key] = 0.0

    def increment(self, by: float) -> None:
        self.endpoint.touched()
        self.endpoint.values[self.key] += by

    observe = increment

    def __del__(self) -> None:
        self.endpoint.touched()
        if self.family not in self.endpoint.families:
            self.endpoint.orphans.append(self.family)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    seen = Endpoint()

    class Family:
        COUNTER, GAUGE, HISTOGRAM = range(3)

        def __init__(self, name: str, description: str, kind: int) -> None:
            seen.touched()
            assert description
            self.name, self.histogram = name, kind == self.HISTOGRAM
            seen.families.add(name)

        def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Series:  # noqa: N802
            assert (buckets is not None) == self.histogram
            return Series(seen, self, labels)

        def __del__(self) -> None:
            seen.touched()
            seen.families.discard(self.name)

    monkeypatch.setattr(TRITON, "MetricFamily", Family, raising=False)
    yield seen
    gc.collect()
    assert not seen.families, "a metric outlives `close`"
    assert not seen.orphans, "Triton refuses a metric whose family is gone"
    assert threading.get_ident() not in seen.threads
    assert len(seen.threads) == 1, "Triton 24.10 crashes when several threads touch its metrics"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_series_of_the_table_is_there_before_anything_happened(endpoint: Endpoint) -> None:
    publisher = Publisher(PIPELINE.speech_lm, dict)
    expected = {
        (metric.name, "speech_lm", *([value] if metric.label else []))
        for metric in metrics.METRICS
        if "speech_lm" in metric.models
        for value in metric.values
    }
    wait_until(lambda: set(endpoint.values) == expected)
    publisher.close()
    assert not any(endpoint.values.values())


def test_requests_are_counted_from_many_threads_and_published_by_one(endpoint: Endpoint) -> None:
    model = RequestMetrics(PIPELINE.tts, dict)
    active, go = (metrics.ACTIVE_REQUESTS, "tts"), threading.Event()

    def request() -> None:
        with model.counting():
            model.heard(0.25)
            go.wait(5)

    threads = [threading.Thread(target=request) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: endpoint.values.get(active) == 12)
    go.set()
    for thread in threads:
        thread.join()
    wait_until(lambda: endpoint.values[active] == 0)
    wait_until(lambda: endpoint.values[metrics.FIRST_AUDIO, "tts"] == pytest.approx(12 * 0.25))
    model.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("x"), "InputError"),
        (QueueFullError("x"), "QueueFullError"),
        (GenerationError("x"), "GenerationError"),
        (RepositoryError("x"), "GenerationError"),  # any other is a failure of the server
        (ZeroDivisionError("x"), "GenerationError"),
    ],
)
def test_an_error_counts_once_by_its_kind(endpoint: Endpoint, error: Exception, kind: str) -> None:
    model = RequestMetrics(PIPELINE.tts_stream, dict)
    model.failed(error)
    wait_until(lambda: endpoint.values.get((metrics.REQUEST_ERRORS, "tts_stream", kind)) == 1)
    model.close()
    assert sum(value for key, value in endpoint.values.items() if key[0] == metrics.REQUEST_ERRORS) == 1
    assert endpoint.values[metrics.CANCELLED_REQUESTS, "tts_stream"] == 0


def test_a_cancellation_is_no_error(endpoint: Endpoint) -> None:
    model = RequestMetrics(PIPELINE.tts_stream, dict)
    model.failed(CancelledError("x"))
    wait_until(lambda: endpoint.values.get((metrics.CANCELLED_REQUESTS, "tts_stream")) == 1)
    model.close()
    assert not any(value for key, value in endpoint.values.items() if key[0] == metrics.REQUEST_ERRORS)


def test_a_thousand_tokens_are_a_handful_of_calls(endpoint: Endpoint) -> None:
    """Each call goes to the server's process: what has not changed is not published, what has not often."""
    tokens = 0
    publisher = Publisher(PIPELINE.speech_lm, lambda: {(metrics.LM_TOKENS, ""): tokens})
    wait_until(lambda: metrics.LM_TOKENS in {key[0] for key in endpoint.values})
    time.sleep(2 * published.PERIOD)
    begin, calls = time.monotonic(), endpoint.calls
    for _ in range(1000):
        tokens += 1
        publisher.changed()
        time.sleep(1e-4)
    wait_until(lambda: endpoint.values[metrics.LM_TOKENS, "speech_lm"] == 1000)
    assert endpoint.calls - calls <= 2 + (time.monotonic() - begin) / published.PERIOD
    idle = endpoint.calls
    time.sleep(4 * published.PERIOD)
    assert endpoint.calls == idle
    publisher.close()
