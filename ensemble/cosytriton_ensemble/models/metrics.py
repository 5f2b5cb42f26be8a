"""How a Python model publishes its metrics on the server's endpoint."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import psutil
import triton_python_backend_utils as pb

from cosytriton_ensemble.errors import CancelledError
from cosytriton_ensemble.metrics import (
    ACTIVE_REQUESTS,
    CANCELLED_REQUESTS,
    ERROR_KINDS,
    FIRST_AUDIO,
    METRICS,
    REQUEST_ERRORS,
    Metric,
)
from cosytriton_ensemble.spec import Stage

PERIOD = 0.05  # seconds between two rounds: each change that is published is a call to the server's process

Series = tuple[str, str]
"""A metric's name, and the value of its own label or ""."""

Readings = Mapping[Series, float]


class ServerMemory:
    """Resident bytes of the server, whose child a model is, and of all its models.

    What several of them map counts for each. Read anew at most each `period` seconds: it is the same for all
    metrics that are published in between.
    """

    def __init__(self, period: float = 10) -> None:
        self._period = period
        self._bytes, self._due = 0.0, 0.0

    def read(self) -> float:
        """The present value."""
        if time.monotonic() >= self._due:
            server = psutil.Process(os.getppid())
            self._bytes = float(sum(map(_resident, (server, *server.children()))))
            self._due = time.monotonic() + self._period
        return self._bytes


class Publisher:
    """Publishes counters and gauges as `collect` reads them, whenever something has `changed`.

    One thread makes, changes and frees all metrics of a model: Triton 24.10 crashes when several threads
    change them, and hangs at its end when a metric outlives `finalize`.

    Args:
        stage: The model.
        collect: Reads the present values, of counters the totals; called in the publisher's thread.

    """

    def __init__(self, stage: Stage, collect: Callable[[], Readings]) -> None:
        self._collect = collect
        self._observed: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self._news, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._publish, args=(stage.name,), daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Have the values read soon; costs nothing worth counting."""
        if not self._news.is_set():
            self._news.set()

    def observe(self, histogram: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observed.put((histogram, value))
        self.changed()

    def close(self) -> None:
        """Free the metrics; to be called from `finalize`."""
        self._closed.set()
        self._news.set()
        self._thread.join()

    def _publish(self, model: str) -> None:
        families = {metric: _family(metric) for metric in METRICS if model in metric.models}
        series = {
            (metric.name, value): _series(metric, family, model, value)
            for metric, family in families.items()
            for value in metric.values
        }
        published = dict.fromkeys(series, 0.0)
        while not self._closed.is_set():
            self._news.clear()
            for key, value in self._collect().items():
                if change := value - published[key]:
                    series[key].increment(change)  # a gauge's may be negative
                    published[key] = value
            while not self._observed.empty():
                histogram, value = self._observed.get()
                series[histogram, ""].observe(value)
            self._closed.wait(PERIOD)
            self._news.wait()
        series.clear()  # before the families, as Triton wants it


def _resident(process: psutil.Process) -> int:
    """Resident bytes of a process; 0 when it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _family(metric: Metric) -> Any:
    kind = getattr(pb.MetricFamily, metric.kind.upper())
    return pb.MetricFamily(name=metric.name, description=metric.meaning, kind=kind)


def _series(metric: Metric, family: Any, model: str, value: str) -> Any:
    """One series on the endpoint, at 0."""
    labels = {"model": model} | ({metric.label: value} if metric.label else {})
    return family.Metric(labels=labels, **({"buckets": list(metric.buckets)} if metric.buckets else {}))


class RequestMetrics:
    """What becomes of a model's requests.

    Args:
        stage: The model.
        further: Reads what else the model publishes.

    """

    def __init__(self, stage: Stage, further: Callable[[], Readings]) -> None:
        self._further = further
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[Series] = Counter()
        self._publisher = Publisher(stage, self._read)
        self.changed, self.close = self._publisher.changed, self._publisher.close

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request as active while it lasts."""
        self._add(ACTIVE_REQUESTS, 1)
        try:
            yield
        finally:
            self._add(ACTIVE_REQUESTS, -1)

    def heard(self, seconds: float) -> None:
        """Take a request's wait for its first audio."""
        self._publisher.observe(FIRST_AUDIO, seconds)

    def failed(self, error: BaseException) -> None:
        """Count a request that ended with an error, or was cancelled."""
        if isinstance(error, CancelledError):
            self._add(CANCELLED_REQUESTS, 1)
            return
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERROR_KINDS]
        self._add(REQUEST_ERRORS, 1, (kinds or ["GenerationError"])[0])

    def _add(self, name: str, by: int, value: str = "") -> None:
        with self._lock:
            self._counts[name, value] += by
        self.changed()

    def _read(self) -> Readings:
        with self._lock:
            counts = dict(self._counts)
        return {**counts, **self._further()}
