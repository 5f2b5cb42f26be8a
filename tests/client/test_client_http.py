"""The HTTP transport against a small server that speaks Triton's protocol over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cosytriton_client import (
    Client,
    ConnectError,
    InvalidInputError,
    OverloadedError,
    RequestTimeoutError,
    ServerFailureError,
    Timeout,
    Voice,
)


class Server(ThreadingHTTPServer):
    """What it answers, and what it saw."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.streamed: list[dict[str, Any]] = []
        self.cancelled, self.released = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        model, action = self.path.split("/")[-2:]
        if action == "generate_stream":
            self._events(json.loads(body))
        elif b"refuse" in body:
            self._json(400, {"error": "text: no words"})
        elif b"busy" in body:
            self._json(503, {"error": "Exceeds maximum queue size"})
        elif b"hang" in body:
            self.server.released.wait(5)
        else:
            self._tensors(self.server.answers[model])

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _tensors(self, tensors: Any) -> None:
        contents = [
            serialize_byte_tensor(a).item() if a.dtype == np.object_ else a.tobytes()
            for a in tensors.values()
        ]
        described = [
            {
                "name": name,
                "datatype": np_to_triton_dtype(a.dtype),
                "shape": a.shape,
                "parameters": {"binary_data_size": len(content)},
            }
            for (name, a), content in zip(tensors.items(), contents, strict=True)
        ]
        head = json.dumps({"outputs": described}).encode()
        data = head + b"".join(contents)
        self.send_response(200)
        self.send_header("Inference-Header-Content-Length", str(len(head)))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _events(self, request: Any) -> None:
        self.server.streamed.append(request)
        text = request["text"]
        if text == "refuse":
            return self._json(400, {"error": "text: no words"})
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        first, second = self.server.answers["chunks"]
        self._event(first)
        if text == "hang":
            return self._wait_for_hang_up()
        if text == "cut off":
            return None
        self._event({"error": "boom"} if text == "fail" else second)
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _event(self, tensors: Any) -> None:
        plain = {
            name: value
            if isinstance(value, str)
            else value.ravel().tolist()
            if value.size > 1
            else _plain(value.item())
            for name, value in tensors.items()
        }
        event = b"data: " + json.dumps({"model_name": "tts_stream", **plain}).encode() + b"\n\n"
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def _wait_for_hang_up(self) -> None:
        self.connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # how it ends with data on the way
            assert self.connection.recv(1) == b""
        self.server.cancelled.set()


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


@pytest.fixture
def server(transport: Any) -> Iterator[Server]:
    server = Server({"voice_encoder": transport.voice, "tts": transport.whole, "chunks": transport.chunks})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    url = f"http://127.0.0.1:{server.server_port}"
    with Client(url, timeout=Timeout(request=0.3, chunk=0.3)) as client:
        yield client


def test_unary(client: Client, voice: Voice, transport: Any) -> None:
    audio = client.synthesize("Hello.", voice)
    np.testing.assert_array_equal(audio.samples, transport.whole["waveform"][0, :2880])


def test_a_stream_carries_every_input_as_flat_lists(
    client: Client, voice: Voice, server: Server, transport: Any
) -> None:
    chunks = list(client.stream("Hello.", voice, seed=3))
    assert [c.token_count for c in chunks] == [2, 1]
    np.testing.assert_array_equal(chunks[0].samples, transport.chunks[0]["waveform"][0])
    (sent,) = server.streamed
    assert (sent["text"], sent["prompt_text"], sent["seed"]) == ("Hello.", "what is said", 3)
    assert len(sent["prompt_mel"]) == 8 * 80
    assert sent["prompt_tokens"] == [0, 1, 2, 3]
    assert sent["id"]


def test_closing_a_stream_hangs_up(client: Client, voice: Voice, server: Server) -> None:
    chunks = client.stream("hang", voice)
    next(chunks)
    chunks.close()
    assert server.cancelled.wait(2)


def test_a_wait_for_a_chunk_ends(client: Client, voice: Voice, server: Server) -> None:
    chunks = client.stream("hang", voice)
    next(chunks)
    with pytest.raises(RequestTimeoutError, match=r"within 0.3 s.*Timeout\(chunk=") as error:
        next(chunks)
    assert server.cancelled.wait(2)
    assert error.tb  # which kept the call's frames alive: the cancel was no work of the garbage collector


def test_a_wait_for_an_answer_ends(client: Client, voice: Voice) -> None:
    with pytest.raises(RequestTimeoutError, match=r"Timeout\(request="):
        client.synthesize("hang", voice)


def test_a_stream_that_is_cut_off_is_no_end(client: Client, voice: Voice) -> None:
    with pytest.raises(ConnectError, match="cut off"):
        list(client.stream("cut off", voice))


def test_a_failure_in_the_middle_of_a_stream(client: Client, voice: Voice) -> None:
    with pytest.raises(ServerFailureError, match="boom"):
        list(client.stream("fail", voice))


def test_the_server_refuses(client: Client, voice: Voice) -> None:
    for call in (client.synthesize, lambda *a: list(client.stream(*a))):
        with pytest.raises(InvalidInputError, match="refused the request: text: no words"):
            call("refuse", voice)


def test_the_server_is_busy(client: Client, voice: Voice) -> None:
    with pytest.raises(OverloadedError, match="Try again later"):
        client.synthesize("busy", voice)


def test_nobody_at_the_port(voice: Voice) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectError, match="Connection refused"):
            Client(f"http://127.0.0.1:{free.getsockname()[1]}").encode(voice)


def test_a_server_that_is_not_http(voice: Voice) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"\0\1\2\n"), daemon=True).start()
        with pytest.raises(ConnectError):
            Client(f"http://127.0.0.1:{other.getsockname()[1]}").encode(voice)
