"""Lower-layer errors become the client's, in one place, with a message for the person who called."""

from __future__ import annotations

import http.client
import queue
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.utils import InferenceServerException

import cosytriton_client
from cosytriton_client import _errors
from cosytriton_client._errors import translating
from cosytriton_ensemble.errors import CosytritonError


class Rpc(grpc.RpcError):  # type: ignore[misc]
    """An error of gRPC as a stub raises it."""

    def __init__(self, text: str, status: str) -> None:
        self._text, self._status = text, status

    def code(self) -> Any:
        return grpc.StatusCode[self._status]

    def details(self) -> str:
        return self._text


def triton(text: str, status: str = "") -> Exception:
    """A text and a status as one of the two protocols brings them."""
    return (
        Rpc(text, status) if status in grpc.StatusCode.__members__ else InferenceServerException(text, status)
    )


QUEUE = "[request id: 1] Exceeds maximum queue size"

CASES = [
    (
        triton("text: no words", "INVALID_ARGUMENT"),
        "InvalidInputError",
        "refused .*text: no words",
    ),
    (triton("text: no words", "400"), "InvalidInputError", "refused"),
    (triton(QUEUE, "UNAVAILABLE"), "OverloadedError", "Try again later"),
    (triton(QUEUE, "503"), "OverloadedError", "Try again later"),
    (triton(QUEUE), "OverloadedError", "Try again later"),
    (triton("Request timeout expired", "UNAVAILABLE"), "OverloadedError", "expired"),
    (triton("failed to connect to all addresses", "UNAVAILABLE"), "ConnectError", "cannot reach"),
    (triton("Received http2 header with status: 404", "UNIMPLEMENTED"), "ConnectError", "address"),
    (triton("Deadline Exceeded", "DEADLINE_EXCEEDED"), "RequestTimeoutError", r"Timeout\(chunk="),
    (triton("Locally cancelled", "CANCELLED"), "RequestCancelledError", "was cancelled"),
    (triton("unknown model: 'tts' is not found", "NOT_FOUND"), "NotReadyError", "'tts'"),
    (triton("Request for unknown model: 'tts' is not found"), "NotReadyError", "until the server is ready"),
    (triton("'tts' has no available versions", "UNAVAILABLE"), "NotReadyError", "does not serve"),
    (triton("Stub process is not healthy", "INTERNAL"), "ServerFailureError", "not healthy"),
    (triton("boom", "500"), "ServerFailureError", "boom"),
    (triton("boom"), "ServerFailureError", "boom"),
    (queue.Empty(), "RequestTimeoutError", r"no answer from grpc://h:1 within 3 s.*Timeout\(chunk="),
    (TimeoutError("timed out"), "RequestTimeoutError", "within 3 s"),
    (ConnectionRefusedError(111, "Connection refused"), "ConnectError", "Connection refused"),
    (http.client.IncompleteRead(b""), "ConnectError", "cut off"),
    (http.client.BadStatusLine("\x00\x01"), "ConnectError", r"not HTTP .*\(BadStatusLine\)"),
    (ValueError("no JSON"), "ServerFailureError", r"cannot be read \(no JSON\)"),
]


@pytest.mark.parametrize(("lower", "name", "message"), CASES)
def test_translation(lower: Exception, name: str, message: str) -> None:
    kind = getattr(cosytriton_client, name)
    with pytest.raises(kind, match=message) as caught, translating("grpc://h:1", "chunk", 3.0):
        raise lower
    assert type(caught.value).__name__ == name
    assert caught.value.__cause__ is lower
    assert "grpc://h:1" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError, GeneratorExit])
def test_what_is_not_of_a_lower_layer_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), translating("grpc://h:1", "chunk", 3.0):
        raise error


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str | None] = {}
    stack: list[str] = []
    for line, name in re.findall(r"^([ │├└─]*)(\w+Error)\b", _errors.__doc__ or "", re.MULTILINE):
        stack[len(line) // 4 :] = [name]
        drawn[name] = stack[-2] if len(stack) > 1 else None
    classes = {
        n: c
        for n, c in vars(_errors).items()
        if isinstance(c, type) and (c is CosytritonError or issubclass(c, _errors.ClientError))
    }
    assert drawn == {n: None if c is CosytritonError else c.__bases__[0].__name__ for n, c in classes.items()}


def test_every_error_is_public() -> None:
    errors = {
        n for n, c in vars(_errors).items() if isinstance(c, type) and issubclass(c, _errors.ClientError)
    }
    assert errors <= set(cosytriton_client.__all__)


def test_tls_is_for_grpc_alone(tmp_path: Path) -> None:
    with pytest.raises(cosytriton_client.InvalidInputError, match="gRPC alone"):
        cosytriton_client.Client("http://localhost:8000", tls=tmp_path)
