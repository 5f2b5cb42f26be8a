"""One model asks another, over the server's own gRPC port; the language model may be in another server.

Not by Triton's BLS calls: in 24.10 they build the responses' arrays without the interpreter's lock, which
corrupts the memory of a model that works on several requests, and a call cannot be cancelled.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_ensemble.errors import CosytritonError, GenerationError
from cosytriton_ensemble.names import LM_VARIABLE, LOOPBACK_VARIABLE, TLS_VARIABLE
from cosytriton_ensemble.protocol import UNLIMITED, Stream, error_from_text, request_message, response_tensors
from cosytriton_ensemble.spec import Feed, Stage
from cosytriton_ensemble.tls import open_channel


class Loopback:
    """Channels to this model's own server and to that of `speech_lm`; feeds have no batch dimension."""

    def __init__(self) -> None:
        own = os.environ.get(LOOPBACK_VARIABLE, "localhost:8001")
        tls = Path(folder) if (folder := os.environ.get(TLS_VARIABLE)) else None
        urls = (own, os.environ.get(LM_VARIABLE, own))
        self._channels = [open_channel(url, tls, UNLIMITED) for url in urls]
        self._stub, self._streaming = map(service_pb2_grpc.GRPCInferenceServiceStub, self._channels)
        self._gathers: dict[str, bool] = {}

    def close(self) -> None:
        """End the connections; to be called from `finalize`."""
        for channel in self._channels:
            channel.close()

    def gathers(self, stage: Stage) -> bool:
        """Whether the server puts requests to a stage into one batch: then their shapes must agree."""
        if stage.name not in self._gathers:
            request = service_pb2.ModelConfigRequest(name=stage.name)
            try:
                config = self._stub.ModelConfig(request).config
            except grpc.RpcError as error:
                raise _error(stage, error.details()) from None
            self._gathers[stage.name] = config.max_batch_size > 1
        return self._gathers[stage.name]

    def call(self, stage: Stage, feed: Feed, *, urgent: bool = False) -> Feed:
        """The one response of a plain model; an error is raised as its model raised it.

        `urgent`: whoever waits for it has heard nothing yet, so that it passes others in the queue.
        """
        try:
            return _without_batch(response_tensors(self._stub.ModelInfer(_message(stage, feed, urgent))))
        except grpc.RpcError as error:
            raise _error(stage, error.details()) from None

    def stream(self, stage: Stage, feed: Feed) -> Responses:
        """Ask `speech_lm`, the one decoupled model that others ask."""
        return Responses(stage, Stream(self._streaming, _message(stage, feed)))


class Responses:
    """The responses of a decoupled model as they come; leaving the `with` block, or `close`, cancels.

    `close` and `send` are safe from any thread.
    """

    def __init__(self, stage: Stage, stream: Stream) -> None:
        self._stage, self._stream = stage, stream
        self.close = stream.close

    def send(self, feed: Feed) -> None:
        """Send a further request on the same stream, such as a piece of text."""
        self._stream.send(_message(self._stage, feed))

    def __iter__(self) -> Iterator[Feed]:
        try:
            for answer in self._stream:
                if answer.error_message:
                    raise _error(self._stage, answer.error_message)
                if answer.infer_response.outputs:  # the last response may carry the final flag alone
                    yield _without_batch(response_tensors(answer.infer_response))
        except grpc.RpcError as error:
            raise _error(self._stage, error.details()) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _message(stage: Stage, feed: Feed, urgent: bool = False) -> object:
    inputs = {tensor.name: feed[tensor.name][None] for tensor in stage.inputs if tensor.name in feed}
    return request_message(stage.name, inputs, uuid.uuid4().hex, urgent=urgent)


def _without_batch(tensors: Feed) -> Feed:
    return {name: array[0] for name, array in tensors.items()}


def _error(stage: Stage, text: str) -> CosytritonError:
    return error_from_text(text) or GenerationError(f"{stage.name}: {text}")
