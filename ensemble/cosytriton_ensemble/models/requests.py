"""The one place that touches Triton's Python API: reading requests, answering, publishing metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from cosytriton_ensemble.errors import (
    CancelledError,
    CosytritonError,
    GenerationError,
    InputError,
    QueueFullError,
)
from cosytriton_ensemble.metrics import ACTIVE_REQUESTS
from cosytriton_ensemble.spec import Feed, Stage

if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
    raise ImportError(
        f"numpy {np.__version__} is installed; Triton's Python stub hands out zeros with numpy 2. "
        "Install `cosytriton[serve]`, which pins numpy < 2."
    )

log = logging.getLogger(__name__)


def read(request: Any, stage: Stage) -> Feed:
    """The tensors of a request by name, without the batch dimension; absent optional ones are left out."""
    feed: Feed = {}
    for tensor in stage.inputs:
        given = pb.get_input_tensor_by_name(request, tensor.name)
        if given is not None:
            # Copied: the shared memory goes back when `execute` returns, which may be before the answer.
            feed[tensor.name] = np.array(given.as_numpy()[0])
    return feed


def tensors(feed: Feed) -> list[Any]:
    """Triton tensors from arrays without batch dimension."""
    return [pb.Tensor(name, np.ascontiguousarray(array[None])) for name, array in feed.items()]


class Sender:
    """Answers one request: any number of responses, then exactly one end."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()  # Triton must not be asked about a request that has ended
        self._ended = False

    def is_cancelled(self) -> bool:
        """Whether the client has closed the request, or it has ended."""
        with self._lock:
            return self._ended or bool(self._sender.is_cancelled())

    def check_client(self) -> None:
        """Raise CancelledError when nobody listens any more."""
        if self.is_cancelled():
            raise CancelledError("The client closed the stream.")

    def send(self, feed: Feed, final: bool = False) -> None:
        """Send the outputs of a response, without batch dimension."""
        self._give(pb.InferenceResponse(tensors(feed)), final)

    def end(self, error: BaseException | None = None) -> None:
        """End the request, with an error if there was one."""
        self._give(None if error is None else pb.InferenceResponse(error=triton_error(error)), final=True)

    def _give(self, response: Any, final: bool) -> None:
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            self._ended = self._ended or final
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever is raised inside ends this request, and this request alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the boundary to Triton: every error becomes a response)
            self.end(error)


class Gauge:
    """A gauge on the server's metrics endpoint.

    One thread makes, changes and frees it: Triton 24.10 crashes when several threads change its metrics, and
    hangs at its end when a metric outlives `finalize`.
    """

    def __init__(self, name: str, description: str, stage: Stage) -> None:
        self._values: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._publish, args=(name, description, stage.name), daemon=True
        )
        self._thread.start()

    def set(self, value: int) -> None:
        """Publish a value."""
        self._values.put(value)

    def close(self) -> None:
        """Free the metric; to be called from `finalize`."""
        self._values.put(None)
        self._thread.join()

    def _publish(self, name: str, description: str, model: str) -> None:
        family = pb.MetricFamily(name=name, description=description, kind=pb.MetricFamily.GAUGE)
        metric = family.Metric(labels={"model": model})
        while (value := self._values.get()) is not None:
            metric.set(value)


class ActiveRequests:
    """Counts the requests of a model that are not answered yet, and publishes the count."""

    def __init__(self, stage: Stage) -> None:
        self._gauge = Gauge(ACTIVE_REQUESTS, "Requests that are being spoken", stage)
        self._lock = threading.Lock()
        self._count = 0
        self.close = self._gauge.close

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count one request while it lasts."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._count += by
            self._gauge.set(self._count)


# By name: Triton adds its classes to the module only after this one is imported.
_CODES: dict[type[CosytritonError], str] = {
    InputError: "INVALID_ARG",
    QueueFullError: "UNAVAILABLE",
    CancelledError: "CANCELLED",
}


def error_text(error: CosytritonError) -> str:
    """How an error travels: a stream of Triton carries no code, so the text begins with the kind.

    (Its header `triton_grpc_error` brings codes, and crashes Triton 24.10 under load.)
    """
    return f"{type(error).__name__}: {error}"


def triton_error(error: BaseException) -> Any:
    """The response that tells a caller what went wrong."""
    if not isinstance(error, CosytritonError):
        log.error("unexpected error", exc_info=error)
        error = GenerationError(f"{type(error).__name__}: {error}")
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "INTERNAL")
    return pb.TritonError(error_text(error), getattr(pb.TritonError, code))


def answer(requests: Sequence[Any], stage: Stage, function: Callable[[Feed], Feed]) -> list[Any]:
    """Responses of a plain model: one function call for each request."""
    responses = []
    for request in requests:
        try:
            responses.append(pb.InferenceResponse(tensors(function(read(request, stage)))))
        except Exception as error:  # noqa: BLE001  (the boundary to Triton: every error becomes a response)
            responses.append(pb.InferenceResponse(error=triton_error(error)))
    return responses
