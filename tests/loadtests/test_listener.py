"""One request through the client, on a transport without a server."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Client, ClientError, OverloadedError, Request, Transport
from cosytriton_client._transport import Tensors
from cosytriton_loadtests.listener import ACCEPTED, Hearing, listen, now
from cosytriton_loadtests.workload import Ask

RATE = 24_000
WAIT = 0.03


def chunk(index: int) -> dict[str, Any]:
    """A tenth of a second; the first one is silent."""
    samples = np.full((1, RATE // 10), 0.5 if index else 0.0, np.float32)
    tensors: dict[str, Any] = {
        "waveform": samples,
        "sample_count": np.array([[samples.size]], np.int32),
        "sample_offset": np.array([[index * samples.size]], np.int64),
        "sample_rate": np.array([[RATE]], np.int32),
        "token_count": np.array([[3]], np.int32),
        "finish_reason": np.array([[b""]], np.object_),
    }
    return tensors


class Slow(Transport):
    """Three chunks with a wait before each, then an error if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.closed_early = False
        self.inputs: Tensors = {}

    def infer(self, request: Request) -> Tensors:
        self.inputs = request.inputs
        time.sleep(WAIT)
        return chunk(1) | {"sample_offset": np.array([[0]], np.int64)}

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        assert further is None
        self.inputs, self.closed_early = request.inputs, True
        for index in range(3):
            time.sleep(WAIT)
            yield chunk(index)
        if self.error:
            raise self.error
        self.closed_early = False

    def close(self) -> None:
        pass


def ask(protocol: str = "grpc-stream", **more: Any) -> Ask:
    return Ask("en", protocol, "hello", "anna", options={"seed": 5}, **more)


def test_a_stream_is_noted_chunk_by_chunk() -> None:
    before = time.time()
    sample = listen(Client(transport=Slow()), ask(), "anna")
    after = time.time()
    waits = np.diff([sample.sent, *(one.at for one in sample.chunks)])
    assert (waits >= WAIT * 0.9).all()
    assert before - 0.01 <= sample.sent <= sample.ended <= after + 0.01
    assert [one.audible for one in sample.chunks] == [None, 0.0, 0.0]
    assert sample.audio_seconds == pytest.approx(0.3)
    assert sample.tokens == 9
    waveforms = np.concatenate([chunk(index)["waveform"][0] for index in range(3)])
    assert sample.digest == hashlib.sha256(waveforms.tobytes()).hexdigest()
    assert Ask(**sample.request) == ask()
    assert not sample.error
    assert not sample.cancelled


def test_a_unary_answer_is_one_chunk() -> None:
    sample = listen(Client(transport=Slow()), ask("http"), "anna")
    assert len(sample.chunks) == 1
    assert sample.first_audio is not None
    assert sample.first_audio >= WAIT * 0.9


def test_a_late_request_is_counted_from_when_it_was_due() -> None:
    due = now() - 5
    sample = listen(Client(transport=Slow()), ask(), "anna", due)
    assert sample.intended == due
    assert sample.first_audio == pytest.approx(5 + WAIT, abs=0.1)


def test_a_listener_leaves() -> None:
    transport = Slow()
    sample = listen(Client(transport=transport), ask(cancel_after=2), "anna")
    assert sample.cancelled
    assert len(sample.chunks) == 2
    assert transport.closed_early
    assert not sample.error


@pytest.mark.parametrize("error", [OverloadedError("full"), ClientError("odd"), KeyError("a bug")])
def test_an_error_is_counted_and_what_was_heard_is_kept(error: Exception) -> None:
    sample = listen(Client(transport=Slow(error)), ask(), "anna")
    assert sample.error == type(error).__name__
    assert sample.message == str(error)
    assert len(sample.chunks) == 3


def test_a_bad_request_that_is_spoken_is_an_error() -> None:
    sample = listen(Client(transport=Slow()), ask(bad="speed"), "anna")
    assert sample.error == ACCEPTED
    assert "wrong speed" in sample.message


def test_a_request_that_is_broken_off_keeps_what_came() -> None:
    hearing = Hearing(ask())
    transport = Slow(KeyboardInterrupt())  # no Exception, as what ends a greenlet is none
    with pytest.raises(KeyboardInterrupt):
        hearing.hear(Client(transport=transport), "anna")
    sample = hearing.sample("UnfinishedError", "too late")
    assert (sample.error, sample.message, len(sample.chunks)) == ("UnfinishedError", "too late", 3)
