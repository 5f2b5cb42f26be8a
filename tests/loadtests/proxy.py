"""Stands between client and server, and watches or harms streams. Forwards any gRPC service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
Handling = Callable[[int, Iterable[bytes]], Iterator[bytes]]
"""Number of a stream, its messages -> what is handed on."""


def passing(_: int, messages: Iterable[bytes]) -> Iterator[bytes]:
    """Hand on what comes."""
    yield from messages


class Clock:
    """Notes for each stream when it came, and when each of its chunks went by."""

    def __init__(self) -> None:
        self._times: list[list[float]] = []

    def __call__(self, _: int, answers: Iterable[bytes]) -> Iterator[bytes]:
        times = [time.perf_counter()]
        self._times.append(times)
        for answer in answers:
            if b"waveform" in answer:
                times.append(time.perf_counter())
            yield answer

    def waits(self, chunk: int) -> list[float]:
        """Seconds until the chunk with this index, of every stream."""
        return [times[1:][chunk] - times[0] for times in self._times]


def dropping(number: int, answers: Iterable[bytes]) -> Iterator[bytes]:
    """Every third stream loses its first chunk."""
    return (answer for index, answer in enumerate(answers) if index or number % 3)


class Mixing:
    """Every third stream is another listener's: what the first one asked for is spoken to it."""

    def __init__(self) -> None:
        self._first: Any = None

    def __call__(self, number: int, requests: Iterable[bytes]) -> Iterator[bytes]:
        for request in requests:
            asked = service_pb2.ModelInferRequest.FromString(request)
            self._first = self._first or asked
            if number % 3 == 0:
                mixed = service_pb2.ModelInferRequest()
                mixed.CopyFrom(self._first)
                mixed.id = asked.id
                asked = mixed
            yield asked.SerializeToString()


@contextmanager
def proxy(
    url: str, requests: Handling = passing, answers: Handling = passing, *, company: bool = True
) -> Iterator[str]:
    """An address behind which the server at `url` seems to be.

    Messages of streams are handled; with `company`, only of those that begin while another is there.
    """
    with grpc.insecure_channel(url, _UNLIMITED) as channel:
        forwarding = _Forwarding(channel, requests, answers, company)
        server = grpc.server(ThreadPoolExecutor(32), [forwarding], options=_UNLIMITED)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, channel: grpc.Channel, requests: Handling, answers: Handling, company: bool) -> None:
        self._channel, self._requests, self._answers = channel, requests, answers
        self._numbers, self._active, self._company = count(), 0, company

    def service(self, details: Any) -> Any:
        """A unary call is a stream of one message, so that one kind of handler does for all."""
        call = self._channel.stream_stream(details.method)
        stream = details.method == STREAM

        def forward(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            self._active += stream
            handled = stream and (self._active > 1 or not self._company)
            number = next(self._numbers)
            answers = call(self._requests(number, messages) if handled else messages)
            context.add_callback(answers.cancel)
            try:
                yield from self._answers(number, answers) if handled else answers
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            finally:
                self._active -= stream

        return grpc.stream_stream_rpc_method_handler(forward)
