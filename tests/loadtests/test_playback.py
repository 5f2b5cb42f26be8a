"""The playback model, against a simulation in steps of a millisecond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cosytriton_loadtests.playback import (
    audible,
    first_audible,
    gaps,
    played_at,
    underruns,
    worst_underrun,
)
from cosytriton_loadtests.samples import Chunk, Sample

RATE = 24_000


def sample(*chunks: Chunk, intended: float = 10.0) -> Sample:
    return Sample("s", "", "grpc-stream", {}, intended, intended, 99.0, chunks)


def simulated(chunks: Sequence[Chunk], step: float = 1e-3) -> list[float]:
    """Underruns by a player that takes a millisecond of audio from its buffer at a time."""
    buffered, waits, wait, heard = 0.0, [], 0.0, 0
    total = sum(chunk.seconds for chunk in chunks)
    time, coming = chunks[0].at, list(chunks)
    played = 0.0
    while played < total - step / 2:
        while coming and coming[0].at <= time + step / 2:
            buffered += coming.pop(0).seconds
            if heard:
                waits.append(wait)
                wait = 0.0
            heard += 1
        if buffered >= step / 2:
            buffered -= step
            played += step
        else:
            wait += step
        time += step
    return waits


def test_underruns_are_those_of_a_player() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        times = 10 + np.cumsum(rng.integers(20, 400, 8)) / 1000
        chunks = [Chunk(float(at), float(rng.integers(50, 400)) / 1000, 0.0) for at in times]
        assert underruns(sample(*chunks)) == pytest.approx(simulated(chunks), abs=5e-3)


def test_an_example_by_hand() -> None:
    """0.5 s at 11.0 are played until 11.5; the next comes 0.2 s late, the third in time."""
    late = sample(Chunk(11.0, 0.5, 0.1), Chunk(11.7, 0.5, 0.0), Chunk(11.8, 0.5, None))
    assert played_at(late.chunks) == pytest.approx([11.0, 11.7, 12.2])
    assert gaps(late) == pytest.approx([0.7, 0.1])
    assert underruns(late) == pytest.approx([0.2, 0.0])
    assert worst_underrun(late) == pytest.approx(0.2)
    assert first_audible(late) == pytest.approx(1.1)


def test_what_is_heard_first_waits_for_what_is_played_before() -> None:
    quiet = sample(Chunk(11.0, 0.5, None), Chunk(11.1, 0.5, 0.02))
    assert first_audible(quiet) == pytest.approx(1.52)
    assert first_audible(sample(Chunk(11.0, 0.5, None))) is None
    assert first_audible(sample()) is None
    assert worst_underrun(sample()) == 0


@pytest.mark.parametrize("silence", [0, 240, 2400, 4800])
def test_speech_is_heard_where_it_begins(silence: int) -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 3e-4, RATE).astype(np.float32)  # noise of -70 dBFS
    samples[silence:] += 0.1 * np.sin(np.arange(RATE - silence) / 10, dtype=np.float32)
    assert audible(samples, RATE) == pytest.approx(silence / RATE)


def test_the_threshold_is_50_db_below_full_scale() -> None:
    level = 10 ** (-50 / 20)
    assert audible(np.full(RATE, level * 1.01, np.float32), RATE) == 0
    assert audible(np.full(RATE, level * 0.99, np.float32), RATE) is None
    assert audible(np.zeros(0, np.float32), RATE) is None
    assert audible(np.full(7, 0.1, np.float32), RATE) == 0  # shorter than a window
