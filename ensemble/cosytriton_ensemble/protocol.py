"""Triton's gRPC protocol, on its own stub: messages, and streams that end cleanly.

tritonclient's streams leave a thread behind for each one that is cancelled, carry errors without their
status, and are one at a time for each client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cosytriton_ensemble.spec import Array

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

# Asks Triton to end a stream with a gRPC status; without it an error is a text without a code.
STREAM_METADATA = [("triton_grpc_error", "true")]


def request_message(model: str, inputs: Mapping[str, Array], request_id: str) -> Any:
    """A `ModelInferRequest` of arrays with batch dimension."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, array in inputs.items():
        datatype = np_to_triton_dtype(array.dtype)
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        content = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        message.raw_input_contents.append(content)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def response_tensors(response: Any) -> dict[str, Array]:
    """The outputs of a `ModelInferResponse`, with batch dimension."""
    result = InferResult(response)
    return {output.name: result.as_numpy(output.name) for output in response.outputs}


def is_final(response: Any) -> bool:
    """Whether a response of a stream is its last one."""
    return bool(response.parameters["triton_final_response"].bool_param)


def held_open(message: Any, ended: threading.Event) -> Iterator[Any]:
    """The one request of a stream, whose sending side stays open until `ended`.

    Triton 24.10 crashes (signal 11) when a stream is cancelled after its sending side was closed.
    """
    yield message
    ended.wait()
