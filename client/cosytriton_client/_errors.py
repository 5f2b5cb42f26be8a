"""What a call can raise, and the one place where the errors of lower layers become these.

CosytritonError
└── ClientError               everything that a client call can raise
    ├── InvalidInputError     text, voice or option refused, here or by the server (an InputError too)
    ├── UnsupportedError      this protocol or installation cannot do it; another can
    ├── ConnectError          nobody answers at the address, or the connection broke
    ├── RequestTimeoutError   one of the limits in `Timeout` ran out
    ├── NotReadyError         the server answers but does not serve the model (starting or stopping)
    ├── OverloadedError       the server's queue is full; the same request may succeed later
    ├── RequestCancelledError the request was cancelled
    └── ServerFailureError    the server failed while it worked on the request
        └── BadAnswerError    it answered with something that is not speech (NaN, silence, wrong length)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from queue import Empty

import grpc
from tritonclient.utils import InferenceServerException

from cosytriton_ensemble.errors import (
    CancelledError,
    CosytritonError,
    GenerationError,
    InputError,
    QueueFullError,
)
from cosytriton_ensemble.protocol import error_from_text


class ClientError(CosytritonError):
    """Base of everything that a client call can raise."""


class InvalidInputError(ClientError, InputError):
    """The text, the voice or an option was refused, by this client or by the server."""


class UnsupportedError(ClientError):
    """The protocol or the installation cannot do this; the message names what can."""


class ConnectError(ClientError):
    """Nobody answers at the address, or the connection broke."""


class RequestTimeoutError(ClientError):
    """A limit of `Timeout` ran out; the message names it."""


class NotReadyError(ClientError):
    """The server answers, but does not serve the model: it is starting, stopping or failed to load it."""


class OverloadedError(ClientError):
    """The server's queue is full; the same request may succeed later."""


class RequestCancelledError(ClientError):
    """The request was cancelled before it was finished."""


class ServerFailureError(ClientError):
    """The server failed while it worked on the request."""


class BadAnswerError(ServerFailureError):
    """The server answered with something that is not speech."""


# A stream reports some errors without a status and "unavailable" has many reasons, so the text goes first.
_BY_TEXT: tuple[tuple[str, type[ClientError]], ...] = (
    ("maximum queue size", OverloadedError),
    ("timeout expired", OverloadedError),  # the limit of the server's queue, not ours
    ("unknown model", NotReadyError),
    ("no available versions", NotReadyError),
    ("not ready", NotReadyError),
)

# What the server's models raise.
_BY_KIND: dict[type[CosytritonError], type[ClientError]] = {
    InputError: InvalidInputError,
    QueueFullError: OverloadedError,
    CancelledError: RequestCancelledError,
    GenerationError: ServerFailureError,
}

# gRPC status names and the HTTP statuses that Triton uses for them.
_BY_STATUS: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidInputError,
    "400": InvalidInputError,
    "UNIMPLEMENTED": ConnectError,  # a gRPC server, but not Triton
    "UNAVAILABLE": ConnectError,
    "503": OverloadedError,
    "NOT_FOUND": NotReadyError,
    "404": NotReadyError,
    "DEADLINE_EXCEEDED": RequestTimeoutError,
    "504": RequestTimeoutError,
    "CANCELLED": RequestCancelledError,
    "499": RequestCancelledError,
}

_MESSAGES: dict[type[ClientError], str] = {
    InvalidInputError: "{url} refused the request: {text}",
    ConnectError: "cannot reach a Triton server at {url}: {text}. Check the address, the port "
    "(gRPC 8001, HTTP 8000 by default) and that the server runs.",
    RequestTimeoutError: "no answer from {url} within {seconds:g} s. Check that the server is healthy, "
    "or allow more with Timeout({limit}=...).",
    NotReadyError: "{url} does not serve this model now: {text}. Wait until the server is ready.",
    OverloadedError: "{url} has too many requests: {text}. Try again later, or send fewer at once.",
    RequestCancelledError: "the request to {url} was cancelled: {text}",
    ServerFailureError: "{url} failed: {text}",
}


@contextmanager
def translating(url: str, limit: str, seconds: float) -> Iterator[None]:
    """Turn the errors of lower layers into `ClientError`s.

    Args:
        url: the server, for the message.
        limit: the field of `Timeout` that bounds this step.
        seconds: its value.
    """
    try:
        yield
    except (InferenceServerException, grpc.RpcError, HTTPException, OSError, Empty, ValueError) as error:
        kind, text = _kind_and_text(error)
        message = _MESSAGES[kind].format(url=url, text=text.rstrip("."), limit=limit, seconds=seconds)
        raise kind(message) from error


def _kind_and_text(error: Exception) -> tuple[type[ClientError], str]:
    if isinstance(error, InferenceServerException):
        return _of_triton(str(error.message()), str(error.status()))
    if isinstance(error, grpc.RpcError):
        return _of_triton(str(error.details()), error.code().name)
    if isinstance(error, (TimeoutError, Empty)):
        return RequestTimeoutError, ""
    if isinstance(error, ValueError):
        return ServerFailureError, f"an answer that cannot be read ({error})"
    if isinstance(error, OSError):
        return ConnectError, str(error) or type(error).__name__
    return ConnectError, f"the answer is not HTTP or was cut off ({type(error).__name__})"


def _of_triton(text: str, status: str) -> tuple[type[ClientError], str]:
    if raised := error_from_text(text):
        return _BY_KIND[type(raised)], str(raised)
    named = [kind for words, kind in _BY_TEXT if words in text]
    return (named or [_BY_STATUS.get(status, ServerFailureError)])[0], text
