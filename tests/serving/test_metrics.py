"""The metrics of the models, read from the endpoint while the server speaks, against the clients' count."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from cosytriton_client import Client, InvalidInputError, Voice
from cosytriton_ensemble import metrics
from cosytriton_ensemble.health import HealthCheck
from cosytriton_ensemble.metrics import METRICS, Metric

TEXTS = ("This is voice number five.", "Please wait for your server.", "one two three four five")
REQUESTS = 6
SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class Endpoint:
    """What the endpoint says of this package's metrics."""

    kinds: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        wanted = set(labels.items())
        return sum(v for (n, found), v in self.values.items() if n == name and wanted <= found)


@pytest.fixture(scope="module")
def scrape(server: Any) -> Callable[[], Endpoint]:
    def read() -> Endpoint:
        endpoint = Endpoint()
        url = f"http://localhost:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        for line in lines:
            if line.startswith("# ") and line.split()[2].startswith("cosytriton_"):
                _, what, name, text = line.split(maxsplit=3)
                (endpoint.kinds if what == "TYPE" else endpoint.meanings)[name] = text
            elif (match := SERIES.match(line)) and match[1].startswith("cosytriton_"):
                endpoint.values[match[1], frozenset(LABEL.findall(match[2]))] = float(match[3])
        return endpoint

    return read


def series_of(metric: Metric) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Name and labels of every line that a metric has on the endpoint."""
    own = [{metric.label: value} if metric.label else {} for value in metric.values]
    labelled = [{"model": model} | labels for model in metric.models for labels in own]
    if metric.kind != "histogram":
        return {(metric.name, frozenset(labels.items())) for labels in labelled}
    bounds = [f"{bound:g}" for bound in metric.buckets] + ["+Inf"]
    lines = {
        (f"{metric.name}{part}", frozenset(labels.items()))
        for labels in labelled
        for part in ("_sum", "_count")
    }
    return lines | {
        (f"{metric.name}_bucket", frozenset((labels | {"le": bound}).items()))
        for labels in labelled
        for bound in bounds
    }


def settled(scrape: Callable[[], Endpoint]) -> Endpoint:
    """The endpoint once nothing is spoken: values follow with a short delay."""
    deadline = time.monotonic() + 10
    while scrape().total(metrics.ACTIVE_REQUESTS) or scrape().total(metrics.ACTIVE_SLOTS):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    return scrape()


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"cosytriton_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith(f"_{metric.unit}") or metric.unit not in ("bytes", "seconds"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_under_load_the_endpoint_has_what_the_table_says_and_nothing_else(
    scrape: Callable[[], Endpoint], client: Client, slt: Voice
) -> None:
    client.encode(slt)
    before = settled(scrape)
    seen: list[Endpoint] = []
    with ThreadPoolExecutor(REQUESTS) as pool:

        def listen(seed: int) -> tuple[float, int]:
            start, tokens, first = time.monotonic(), 0, 0.0
            for chunk in client.stream(TEXTS[seed % len(TEXTS)], slt, seed=seed):
                first = first or time.monotonic() - start
                tokens += chunk.token_count
            return first, tokens

        jobs = [pool.submit(listen, seed) for seed in range(REQUESTS)]
        while not all(job.done() for job in jobs):
            seen.append(scrape())
        heard = [job.result() for job in jobs]
    after = settled(scrape)

    assert after.kinds == {metric.name: metric.kind for metric in METRICS}
    assert after.meanings == {metric.name: metric.meaning for metric in METRICS}
    assert set(after.values) == set().union(*(series_of(metric) for metric in METRICS))
    assert set(seen[0].values) == set(after.values)  # from the start, not from the first event

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def most(name: str) -> float:
        return max(endpoint.total(name) for endpoint in seen)

    waits, tokens = [wait for wait, _ in heard], sum(count for _, count in heard)
    assert grown("cosytriton_first_audio_seconds_count", model="tts_stream") == REQUESTS
    # The client waits for the way there and back too.
    assert 0.5 * sum(waits) < grown("cosytriton_first_audio_seconds_sum", model="tts_stream") < sum(waits)
    assert grown(metrics.LM_ENDS, reason="end") == grown(metrics.LM_ENDS) == REQUESTS
    assert tokens <= grown(metrics.LM_TOKENS) < 1.5 * tokens  # long pauses are made and not spoken
    # The first token of a request comes from its prompt; a step's last one may be the end, which is none.
    assert grown(metrics.LM_STEP_ROWS) == grown(metrics.LM_TOKENS)
    mean_batch = grown(metrics.LM_STEP_ROWS) / grown(metrics.LM_STEPS)
    assert 1 < mean_batch <= most(metrics.ACTIVE_SLOTS) <= after.total(metrics.SLOTS) == 8
    assert most(metrics.ACTIVE_REQUESTS) == REQUESTS
    assert most(metrics.KV_CACHE) > after.total(metrics.KV_CACHE) == 0
    assert most(metrics.FLOW_STATE) > after.total(metrics.FLOW_STATE) > 0  # that of the prompt is kept
    assert 0 < after.total(metrics.PREFIX_CACHE) <= 32 << 20


def test_a_histogram_counts_what_is_below_each_bound(
    scrape: Callable[[], Endpoint], client: Client, slt: Voice
) -> None:
    client.synthesize(TEXTS[0], slt)
    endpoint = settled(scrape)
    name = metrics.FIRST_AUDIO
    bounds = [f"{bound:g}" for bound in metrics.FIRST_AUDIO_BUCKETS] + ["+Inf"]
    counts = [endpoint.total(f"{name}_bucket", le=bound) for bound in bounds]
    assert all(low <= high for low, high in pairwise(counts))
    assert counts[-1] == endpoint.total(f"{name}_count") > 0


def test_a_probe_is_no_request_of_a_user(scrape: Callable[[], Endpoint], server: Any) -> None:
    """The supervisor probes every 20 s with an empty request, which the models refuse."""
    before, check = settled(scrape), HealthCheck(server.grpc_url, deadline=60)
    check.alive()
    check.ready()
    after = settled(scrape)
    for name in (metrics.REQUEST_ERRORS, f"{metrics.FIRST_AUDIO}_count"):
        assert after.total(name) == before.total(name), name


def test_errors_cancellations_and_limits_are_counted_by_their_kind(
    scrape: Callable[[], Endpoint], client: Client, slt: Voice
) -> None:
    before = settled(scrape)
    with pytest.raises(InvalidInputError):
        client.synthesize("Hello.", slt, speed=9)
    with pytest.raises(InvalidInputError):
        list(client.stream("Hello.", slt, speed=9))
    with closing(client.stream("one two three four five six seven eight nine ten, " * 10, slt)) as stream:
        next(stream)
    client.synthesize(TEXTS[0], slt, max_tokens=20)
    after = settled(scrape)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    for model in ("tts", "tts_stream"):
        assert grown(metrics.REQUEST_ERRORS, model=model, kind="InputError") == 1
    assert grown(metrics.REQUEST_ERRORS) == 2
    assert grown(metrics.CANCELLED_REQUESTS, model="tts_stream") == grown(metrics.CANCELLED_REQUESTS) == 1
    assert grown(metrics.LM_ENDS, reason="length") == 1
