"""What is sent again: only a request of which nothing was heard, and only where that may help."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

from cosytriton_client import (
    Client,
    ClientError,
    ConnectError,
    InvalidInputError,
    NotReadyError,
    OverloadedError,
    Request,
    RequestTimeoutError,
    ServerFailureError,
)

PASSING = (ConnectError, NotReadyError, OverloadedError)
LASTING = (InvalidInputError, RequestTimeoutError, ServerFailureError)


class Faulty:
    """A transport that fails a number of times, then answers as the other does."""

    def __init__(self, other: Any, error: type[ClientError], times: int, heard: int = 0) -> None:
        self.other, self.error, self.times, self.heard = other, error, times, heard
        self.requests: list[Request] = []

    def infer(self, request: Request) -> Any:
        self._fail(request)
        return self.other.infer(request)

    def stream(self, request: Request, further: Iterable[Any] | None = None) -> Generator[Any, None, None]:
        if self.heard and self.times:
            yield from self.other.chunks[: self.heard]
        self._fail(request)
        yield from self.other.stream(request, further)

    def close(self) -> None:
        self.other.close()

    def _fail(self, request: Request) -> None:
        self.requests.append(request)
        if self.times:
            self.times -= 1
            raise self.error("planted")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr("time.sleep", taken.append)
    return taken


def samples(answer: Any) -> int:
    return (
        sum(len(chunk.samples) for chunk in answer) if isinstance(answer, Iterator) else len(answer.samples)
    )


@pytest.mark.parametrize("call", ["synthesize", "stream"])
@pytest.mark.parametrize("error", PASSING)
def test_what_passes_is_tried_again(transport: Any, call: str, error: type[ClientError], pauses: Any) -> None:
    expected = samples(getattr(Client(transport=transport), call)("Hello.", "anna"))
    faulty = Faulty(transport, error, times=2)
    client = Client(transport=faulty, retries=2)
    assert samples(getattr(client, call)("Hello.", "anna")) == expected
    assert len({request.request_id for request in faulty.requests}) == 3  # one of its own for each
    assert 0.2 <= pauses[0] <= 0.3
    assert 0.4 <= pauses[1] <= 0.6


def test_a_voice_is_encoded_again(transport: Any, voice: Any) -> None:
    Client(transport=Faulty(transport, ConnectError, times=1), retries=1).encode(voice)


@pytest.mark.parametrize(("retries", "sent"), [(0, 1), (1, 2), (3, 4)])
def test_the_last_failure_is_raised(transport: Any, retries: int, sent: int) -> None:
    faulty = Faulty(transport, ConnectError, times=9)
    with pytest.raises(ConnectError):
        Client(transport=faulty, retries=retries).synthesize("Hello.", "anna")
    assert len(faulty.requests) == sent


@pytest.mark.parametrize("error", LASTING)
def test_what_would_fail_again_is_not_sent_again(transport: Any, error: type[ClientError]) -> None:
    faulty = Faulty(transport, error, times=1)
    with pytest.raises(error):
        list(Client(transport=faulty, retries=5).stream("Hello.", "anna"))
    assert len(faulty.requests) == 1


def test_what_has_sounded_is_not_said_twice(transport: Any) -> None:
    faulty = Faulty(transport, ConnectError, times=1, heard=1)
    stream = Client(transport=faulty, retries=5).stream("Hello.", "anna")
    next(stream)
    with pytest.raises(ConnectError):
        next(stream)
    assert len(faulty.requests) == 1


def test_a_text_by_pieces_is_not_sent_again(transport: Any) -> None:
    faulty = Faulty(transport, ConnectError, times=1)
    with pytest.raises(ConnectError):
        list(Client(transport=faulty, retries=5).stream(iter(["Hello."]), "anna"))
    assert len(faulty.requests) == 1


def test_closing_before_and_behind_the_first_chunk_cancels(transport: Any) -> None:
    client = Client(transport=transport, retries=1)
    client.stream("Hello.", "anna").close()
    assert not transport.cancelled
    stream = client.stream("Hello.", "anna")
    next(stream)
    stream.close()
    assert transport.cancelled
