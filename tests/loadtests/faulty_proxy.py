"""Stands between client and server, and harms streams while there are several. Forwards any gRPC service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
Fault = Callable[[int, Iterable[bytes]], Iterator[bytes]]


def passing(_: int, messages: Iterable[bytes]) -> Iterator[bytes]:
    """No fault."""
    yield from messages


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
def proxy(url: str, requests: Fault = passing, answers: Fault = passing) -> Iterator[str]:
    """An address behind which the server at `url` seems to be; the faults change messages of streams."""
    with grpc.insecure_channel(url, _UNLIMITED) as channel:
        server = grpc.server(
            ThreadPoolExecutor(32), [_Forwarding(channel, requests, answers)], options=_UNLIMITED
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class _Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, channel: grpc.Channel, requests: Fault, answers: Fault) -> None:
        self._channel, self._requests, self._answers = channel, requests, answers
        self._numbers, self._active = count(), 0

    def service(self, details: Any) -> Any:
        """A unary call is a stream of one message, so that one kind of handler does for all."""
        call = self._channel.stream_stream(details.method)
        stream = details.method == STREAM

        def forward(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            self._active += stream
            harm, number = stream and self._active > 1, next(self._numbers)
            answers = call(self._requests(number, messages) if harm else messages)
            context.add_callback(answers.cancel)
            try:
                yield from self._answers(number, answers) if harm else answers
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            finally:
                self._active -= stream

        return grpc.stream_stream_rpc_method_handler(forward)
