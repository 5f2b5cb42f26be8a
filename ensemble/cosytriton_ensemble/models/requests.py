"""What touches Triton's Python API, but for metrics: reading requests and answering them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from cosytriton_ensemble.models.metrics import RequestMetrics
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
    """Answers one request: any number of responses, then exactly one end; `metrics` hear of it."""

    def __init__(self, request: Any, metrics: RequestMetrics | None = None) -> None:
        self._sender = request.get_response_sender()
        self._metrics, self._arrived, self._heard = metrics, time.monotonic(), False
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
        if self._metrics is None:
            return
        if not self._heard:
            self._heard = True
            self._metrics.heard(time.monotonic() - self._arrived)
        self._metrics.changed()

    def end(self, error: BaseException | None = None) -> None:
        """End the request, with an error if there was one."""
        if error is not None and self._metrics is not None:
            self._metrics.failed(error)
        self._give(None if error is None else pb.InferenceResponse(error=triton_error(error)), final=True)

    def _give(self, response: Any, final: bool) -> None:
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            self._ended = self._ended or final
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)

    def counting(self) -> AbstractContextManager[None]:
        """Count the request as active while it lasts."""
        return self._metrics.counting() if self._metrics else nullcontext()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever is raised inside ends this request, and this request alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the boundary to Triton: every error becomes a response)
            self.end(error)


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
