"""Warnings about a reference recording, against recordings whose faults are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from cosytriton_ensemble.quality import reference_warnings

RATE = 16_000


@pytest.fixture(scope="module")
def speech() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A real recording of one speaker (LibriVox)."""
    path = next((Path(__file__).parents[1] / "data").glob("*.wav"))
    audio, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE
    return np.asarray(audio[: 8 * RATE], np.float32)


def test_clean_speech_has_no_fault(speech: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    assert reference_warnings(speech, RATE) == []


def test_each_fault_is_named(speech: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    rng, second = np.random.default_rng(0), np.zeros(RATE, np.float32)
    faults = {
        "s long: record 3 to 10 s": speech[:RATE],
        "every request pays": np.tile(speech, 5),
        "are clipped": np.clip(speech * 20, -1, 1),
        "very quiet": speech * 0.01,
        "of it is silence": np.concatenate([speech[: 2 * RATE], np.tile(second, 5)]),
        "silence at an end": np.concatenate([np.tile(second, 2), speech]),
        "no voice was found": rng.normal(0, 0.1, 5 * RATE).astype(np.float32),
    }
    for words, audio in faults.items():
        assert any(words in warning for warning in reference_warnings(audio, RATE)), words
