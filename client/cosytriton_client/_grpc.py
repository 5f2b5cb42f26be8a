"""Triton over gRPC."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from cosytriton_client._errors import translating
from cosytriton_client._transport import Request, Tensors, Timeout
from cosytriton_ensemble.protocol import (
    UNLIMITED,
    Stream,
    is_final,
    request_message,
    response_tensors,
)
from cosytriton_ensemble.tls import open_channel

_OPTIONS = [
    *UNLIMITED,
    # A name with several addresses, such as a headless Service: they take turns, instead of one taking all.
    ("grpc.lb_policy_name", "round_robin"),
    # Finds out that the other side is gone, which a quiet connection does not tell.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class GrpcTransport:
    """One channel, over which any number of unary and streamed calls go side by side."""

    def __init__(self, host: str, port: int, timeout: Timeout, tls: Path | None = None) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._url = f"grpc://{target}"
        self._timeout = timeout
        self._channel = open_channel(target, tls, _OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._reached = False

    def infer(self, request: Request) -> Tensors:
        """The answer to a unary request."""
        self._reach()
        with translating(self._url, "request", self._timeout.request):
            return response_tensors(self._stub.ModelInfer(_message(request), timeout=self._timeout.request))

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        """The answers of a decoupled model; closing the generator cancels the request on the server."""
        self._reach()
        stream = Stream(self._stub, _message(request))
        answers: SimpleQueue[Any] = SimpleQueue()
        # gRPC has no limit for the wait between two messages; a queue has.
        threading.Thread(target=_read, args=(stream, answers), daemon=True).start()
        if further is not None:
            threading.Thread(target=_write, args=(stream, request, further, answers), daemon=True).start()
        limit, seconds = "first_chunk", self._timeout.first_chunk
        try:
            final = False
            while not final:
                with translating(self._url, limit, seconds):
                    answer = answers.get(timeout=seconds)
                if isinstance(answer, _CallersError):
                    raise answer.error
                with translating(self._url, limit, seconds):
                    response = _response(answer)
                final = is_final(response) and response.id == request.request_id
                if response.outputs:
                    yield response_tensors(response)
                limit, seconds = "chunk", self._timeout.chunk
        finally:
            stream.close()

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._channel.close()

    def _reach(self) -> None:
        # gRPC connects lazily: without this, an address that swallows packets would use up `request`.
        if not self._reached:
            with translating(self._url, "connect", self._timeout.connect):
                self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=self._timeout.connect)
            self._reached = True


def _read(stream: Stream, answers: SimpleQueue[Any]) -> None:
    """Hand over each answer, and at last what ended them."""
    try:
        for answer in stream:
            answers.put(answer)
        answers.put(InferenceServerException("the stream ended before its final answer"))
    except grpc.RpcError as error:
        answers.put(error)


@dataclass(frozen=True)
class _CallersError:
    """What the iterator of the caller's text raised; it is theirs, not the protocol's."""

    error: Exception


def _write(stream: Stream, request: Request, further: Iterable[Tensors], answers: SimpleQueue[Any]) -> None:
    """Send what comes from the caller's iterator, as long as somebody listens."""
    try:
        for inputs in further:
            if not stream.send(request_message(request.model, inputs, uuid.uuid4().hex)):
                return
    except Exception as error:  # noqa: BLE001  (raised again where the call is answered)
        answers.put(_CallersError(error))


def _response(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    if answer.error_message:
        raise InferenceServerException(answer.error_message)
    return answer.infer_response


def _message(request: Request) -> Any:
    return request_message(request.model, request.inputs, request.request_id)
