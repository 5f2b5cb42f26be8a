"""Triton's gRPC protocol, on its own stub: messages, and streams that end cleanly.

tritonclient's streams leave a thread behind for each one that is cancelled, and are one at a time for each
client.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cosytriton_ensemble.errors import (
    CancelledError,
    CosytritonError,
    GenerationError,
    InputError,
    QueueFullError,
)
from cosytriton_ensemble.spec import Array

URGENT = 1  # priority in the queue of a stage: above that of requests that name none
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

_KINDS = {kind.__name__: kind for kind in (InputError, QueueFullError, CancelledError, GenerationError)}
_ERROR = re.compile(rf"\b({'|'.join(_KINDS)}): (.*)", re.DOTALL)


def error_from_text(text: str) -> CosytritonError | None:
    """The error that a model raised (see `models.requests.error_text`), or None: it is Triton's own."""
    found = _ERROR.search(text)
    return _KINDS[found[1]](found[2]) if found else None


def request_message(model: str, inputs: Mapping[str, Array], request_id: str, *, urgent: bool = False) -> Any:
    """A `ModelInferRequest` of arrays with batch dimension; an `urgent` one passes others in the queue."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if urgent:
        message.parameters["priority"].uint64_param = URGENT
    for name, array in inputs.items():
        datatype = np_to_triton_dtype(array.dtype)
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        content = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        message.raw_input_contents.append(content)
    return message


def response_tensors(response: Any) -> dict[str, Array]:
    """The outputs of a `ModelInferResponse`, with batch dimension."""
    result = InferResult(response)
    return {output.name: result.as_numpy(output.name) for output in response.outputs}


def is_final(response: Any) -> bool:
    """Whether a response of a stream is its last one."""
    return bool(response.parameters["triton_final_response"].bool_param)


class Stream:
    """A request to a decoupled model and its responses; `close` cancels what has not ended.

    The sending side stays open until the end: Triton 24.10 crashes (signal 11) when a stream is cancelled
    after it was closed. Until then `send` brings further requests on the same stream, which reach the model
    after the first one and in order; of them only errors are answered.
    """

    def __init__(self, stub: Any, message: Any, seconds: float | None = None) -> None:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        self._id = message.id
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # None: no more
        self._outgoing.put(message)
        self._call = stub.ModelStreamInfer(iter(self._outgoing.get, None), timeout=seconds)
        self._final = self._closed = False

    def __iter__(self) -> Iterator[Any]:
        """Every `ModelStreamInferResponse`, up to the final one."""
        for answer in self._call:
            if self._final:
                continue  # nothing comes: Triton is closing its side
            response = answer.infer_response
            # The refusal of a further request is final too, but not the end of the first one.
            self._final = is_final(response) and response.id == self._id
            if self._final:
                self._end()
            yield answer

    def send(self, message: Any) -> bool:
        """Send a further request; False when the first one has ended. Safe from any thread."""
        self._outgoing.put(message)
        return not self._closed

    def close(self) -> None:
        """Cancel the request unless it has ended; safe from any thread."""
        if not self._final:
            self._call.cancel()
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._outgoing.put(None)
