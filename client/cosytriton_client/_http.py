"""Triton over HTTP: binary tensors for unary calls, server-sent events for streams.

On the standard library's connections: tritonclient's own HTTP client may not be used from several threads
and cannot stream. Its encoding of tensors is used.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from socket import socket
from typing import Any

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from cosytriton_client._errors import UnsupportedError, translating
from cosytriton_client._transport import Request, Tensors, Timeout

_READ_BYTES = 1 << 16
_ENVELOPE = {"id", "model_name", "model_version", "parameters"}  # what an event holds besides tensors
_HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpTransport:
    """One connection a call."""

    def __init__(self, host: str, port: int, timeout: Timeout) -> None:
        self._host, self._port = host, port
        self._url = f"http://{host}:{port}"
        self._timeout = timeout

    def infer(self, request: Request) -> Tensors:
        """The answer to a unary request."""
        body, header_length = InferenceServerClient.generate_request_body(
            _inputs(request), request_id=request.request_id
        )
        headers = {} if header_length is None else {_HEADER_LENGTH: str(header_length)}
        with (
            self._connected() as (connection, _),
            translating(self._url, "request", self._timeout.request),
            _posted(connection, f"/v2/models/{request.model}/infer", body, headers) as response,
        ):
            length = response.getheader(_HEADER_LENGTH)
            result = InferenceServerClient.parse_response_body(
                response.read(), header_length=None if length is None else int(length)
            )
            names = [output["name"] for output in result.get_response()["outputs"]]
            return {name: result.as_numpy(name) for name in names}

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        """The answers of a decoupled model; closing the generator drops the connection, which cancels."""
        if further is not None:
            raise UnsupportedError(
                "text that comes by pieces needs a stream in both directions, which HTTP has not: use gRPC "
                "('host:port', usually port 8001), or join the pieces."
            )
        body, headers = json.dumps(_plain(request)).encode(), {"Content-Type": "application/json"}
        path = f"/v2/models/{request.model}/generate_stream"
        limit, seconds = "first_chunk", self._timeout.first_chunk
        with self._connected() as (connection, wire), ExitStack() as opened:
            wire.settimeout(seconds)
            with translating(self._url, limit, seconds):
                events = _events(opened.enter_context(_posted(connection, path, body, headers)))
            while True:
                with translating(self._url, limit, seconds):
                    tensors = next(events, None)
                if tensors is None:
                    return
                yield tensors
                limit, seconds = "chunk", self._timeout.chunk
                wire.settimeout(seconds)

    def close(self) -> None:
        """Nothing stays open between calls."""

    @contextmanager
    def _connected(self) -> Iterator[tuple[HTTPConnection, socket]]:
        """A connection and its socket, whose limit is that of a unary request."""
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout.connect)
        try:
            with translating(self._url, "connect", self._timeout.connect):
                connection.connect()
            # Kept, because the connection lets go of its socket once the response reads from it.
            wire: socket = connection.sock
            wire.settimeout(self._timeout.request)
            yield connection, wire
        finally:
            connection.close()


@contextmanager
def _posted(
    connection: HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> Iterator[HTTPResponse]:
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    try:
        if response.status != 200:
            text = response.read().decode(errors="replace").strip()
            raise InferenceServerException(_error_text(text), status=str(response.status))
        yield response
    finally:
        response.close()  # the last holder of the socket: this is what the server sees as a cancel


def _error_text(text: str) -> str:
    """Triton's message out of its JSON, which a stream puts into an event; a proxy's text as it is."""
    try:
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _events(response: HTTPResponse) -> Iterator[Tensors]:
    """The tensors of each server-sent event."""
    rest = b""
    # Not readline: it takes a connection that broke for the end of the stream.
    while data := response.read1(_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield _event_tensors(json.loads(line.removeprefix(b"data:")))


def _event_tensors(event: dict[str, Any]) -> Tensors:
    if "error" in event:
        raise InferenceServerException(str(event["error"]))
    return {name: _array(value) for name, value in event.items() if name not in _ENVELOPE}


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value).reshape(1, -1)
    return array.astype({"f": np.float32, "U": np.object_}.get(array.dtype.kind, np.int64))


def _inputs(request: Request) -> list[InferInput]:
    inputs = []
    for name, array in request.inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, binary_data=True)
        inputs.append(tensor)
    return inputs


def _plain(request: Request) -> dict[str, Any]:
    """The inputs as JSON for Triton's generate extension, which takes flat lists and infers the shape."""
    values: dict[str, Any] = {"id": request.request_id}
    for name, array in request.inputs.items():
        flat = [v.decode() if isinstance(v, bytes) else v for v in array.ravel().tolist()]
        values[name] = flat[0] if len(flat) == 1 else flat
    return values
