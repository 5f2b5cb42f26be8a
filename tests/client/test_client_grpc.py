"""The gRPC transport against a small server that speaks Triton's protocol over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from cosytriton_client import (
    Client,
    ConnectError,
    InvalidInputError,
    Request,
    RequestTimeoutError,
    ServerFailureError,
    Timeout,
    Voice,
)
from cosytriton_client._audio import Samples


def response(tensors: Any, request: Any, final: bool | None = None) -> Any:
    answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, array in tensors.items():
        datatype = np_to_triton_dtype(array.dtype)
        answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        content = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        answer.raw_output_contents.append(content)
    if final is not None:
        answer.parameters["triton_final_response"].bool_param = final
    return answer


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What it does hangs on the request's text."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.cancelled = threading.Event()
        self.closed_by_client = threading.Event()
        self.ids: list[str] = []

    def ServerLive(self, _request: Request, _context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._does(request, b"refuse"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text: no words")
        if self._does(request, b"hang"):
            time.sleep(1)
        return response(self.answers[request.model_name], request)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        # Triton's header for codes in streams: under load it crashes the server.
        assert "triton_grpc_error" not in {m.key for m in context.invocation_metadata()}
        ended = threading.Event()  # of this call: `cancelled` is set by the end of any call
        context.add_callback(ended.set)
        context.add_callback(self.cancelled.set)
        request = next(requests)
        threading.Thread(target=self._watch, args=(requests,), daemon=True).start()
        assert request.parameters["triton_enable_empty_final_response"].bool_param
        self.ids.append(request.id)
        if self._does(request, b"refuse"):  # a stream has no code; the kind stands in the text
            yield service_pb2.ModelStreamInferResponse(error_message="InputError: text: no words")
        yield self._chunk(request, 0)
        if self._does(request, b"hang"):
            ended.wait(5)
        if self._does(request, b"fail"):
            yield service_pb2.ModelStreamInferResponse(error_message="boom")
        if self._does(request, b"last chunk is final"):
            yield self._chunk(request, 1, final=True)
        else:
            yield self._chunk(request, 1)
            yield service_pb2.ModelStreamInferResponse(infer_response=response({}, request, final=True))
        if self._does(request, b"silence"):  # Triton leaves the stream open for more requests
            ended.wait(5)

    def _watch(self, requests: Any) -> None:
        with contextlib.suppress(Exception):  # how it ends when the stream is cancelled
            for _ in requests:
                pass
            self.closed_by_client.set()

    def _chunk(self, request: Any, index: int, final: bool | None = False) -> Any:
        answer = response(self.answers["chunks"][index], request, final)
        return service_pb2.ModelStreamInferResponse(infer_response=answer)

    def _does(self, request: Any, word: bytes) -> bool:
        return any(word in content for content in request.raw_input_contents)


@pytest.fixture
def servicer(transport: Any) -> Servicer:
    return Servicer({"voice_encoder": transport.voice, "tts": transport.whole, "chunks": transport.chunks})


@contextlib.contextmanager
def listening(servicer: Servicer) -> Iterator[int]:
    """The port of a server."""
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.fixture
def client(servicer: Servicer) -> Iterator[Client]:
    with (
        listening(servicer) as port,
        Client(f"127.0.0.1:{port}", timeout=Timeout(request=0.3, chunk=0.3)) as client,
    ):
        yield client


def test_the_addresses_of_a_name_take_turns(
    servicer: Servicer, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Servicer(servicer.answers)
    channel = grpc.insecure_channel
    with listening(servicer) as first, listening(other) as second:
        addresses = f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"  # as a headless Service's name has
        monkeypatch.setattr(grpc, "insecure_channel", lambda _, options: channel(addresses, options))
        with Client("speech-headless:8001") as client:
            for _ in range(20):
                list(client.stream("Hello.", voice))
    assert 9 <= len(servicer.ids) <= 11
    assert len(servicer.ids) + len(other.ids) == 20


def test_unary(client: Client, voice: Voice, transport: Any) -> None:
    audio = client.synthesize("Hello.", voice)
    np.testing.assert_array_equal(audio.samples, transport.whole["waveform"][0, :2880])


@pytest.mark.parametrize("text", ["Hello.", "last chunk is final"])
def test_a_stream_ends_with_the_final_flag(client: Client, voice: Voice, text: str) -> None:
    assert [c.token_count for c in client.stream(text, voice)] == [2, 1]


def test_streams_run_side_by_side_with_ids_of_their_own(
    client: Client, voice: Voice, servicer: Servicer
) -> None:
    streams = [client.stream("Hello.", voice) for _ in range(3)]
    firsts = [next(s).token_count for s in streams]
    assert firsts == [2, 2, 2]
    assert [len(list(s)) for s in streams] == [1, 1, 1]
    assert len(set(servicer.ids)) == 3


def test_closing_a_stream_cancels_on_the_server(client: Client, voice: Voice, servicer: Servicer) -> None:
    with contextlib.closing(client.stream("hang", voice)) as chunks:
        next(chunks)
        assert not servicer.cancelled.is_set()
    assert servicer.cancelled.wait(2)


def test_leaving_the_loop_cancels_on_the_server(client: Client, voice: Voice, servicer: Servicer) -> None:
    for _ in client.stream("hang", voice):
        break
    assert servicer.cancelled.wait(2)


def test_the_sending_side_stays_open(client: Client, voice: Voice, servicer: Servicer) -> None:
    """Triton 24.10 crashes when a stream is cancelled after its sending side was closed."""
    with contextlib.closing(client.stream("hang", voice)) as chunks:
        next(chunks)
        assert not servicer.closed_by_client.wait(0.1)


def test_no_thread_outlives_its_stream(client: Client, voice: Voice) -> None:
    def readers() -> list[str]:  # of streams; other threads are the server's, which runs in this process
        return [t.name for t in threading.enumerate() if "_read" in t.name or "consume" in t.name]

    for text in ("Hello.", "fail", "refuse", "hang"):
        with contextlib.suppress(ServerFailureError, InvalidInputError):
            for _ in client.stream(text, voice):
                if text == "hang":
                    assert readers()
                    break
    deadline = time.monotonic() + 2
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() == []


def test_a_wait_for_a_chunk_ends(client: Client, voice: Voice, servicer: Servicer) -> None:
    chunks = client.stream("hang", voice)
    next(chunks)
    with pytest.raises(RequestTimeoutError, match=r"within 0.3 s.*Timeout\(chunk=") as error:
        next(chunks)
    assert servicer.cancelled.wait(2)
    assert error.tb  # which kept the call's frames alive: the cancel was no work of the garbage collector


def test_a_wait_for_an_answer_ends(client: Client, voice: Voice) -> None:
    with pytest.raises(RequestTimeoutError, match=r"within 0.3 s.*Timeout\(request="):
        client.synthesize("hang", voice)


def test_the_server_refuses(client: Client, voice: Voice) -> None:
    for call in (client.synthesize, lambda *a: list(client.stream(*a))):
        with pytest.raises(InvalidInputError, match="refused the request: text: no words"):
            call("refuse", voice)


def test_a_failure_in_the_middle_of_a_stream(client: Client, voice: Voice) -> None:
    chunks = client.stream("fail", voice)
    next(chunks)
    with pytest.raises(ServerFailureError, match="boom"):
        next(chunks)


def test_nobody_at_the_port(voice: Voice) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{free.getsockname()[1]}"
        with (
            Client(url) as client,
            pytest.raises(ConnectError, match=f"cannot reach a Triton server at {url}"),
        ):
            client.encode(voice)


def test_a_port_that_never_answers(voice: Voice) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Client(url, timeout=Timeout(connect=0.3)) as client,
            pytest.raises((ConnectError, RequestTimeoutError)),
        ):
            client.encode(voice)


def test_the_callers_text_is_left_alone_once_nobody_listens(client: Client, voice: Voice) -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        for number in range(10**6):
            taken.append(number)
            time.sleep(0.01)
            yield "word "

    chunks = client.stream(endless(), voice)
    next(chunks)
    chunks.close()
    time.sleep(0.2)
    count = len(taken)
    time.sleep(0.2)
    assert len(taken) == count


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("odd"), RuntimeError("gone")])
def test_an_error_of_the_callers_text_is_raised_as_it_is(
    client: Client, samples: Samples, error: Exception
) -> None:
    def broken() -> Iterator[str]:
        yield from ()
        raise error

    with pytest.raises(type(error), match=str(error)):
        list(client.stream(broken(), Voice(samples, 16_000, "hang")))
