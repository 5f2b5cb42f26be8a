"""Distances of recordings, against what they are by construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cosytriton_loadtests.waveforms import EXACT_DB, mel_distance, snr, warped_mean

RATE = 24_000


def tones(*pitches: float, seconds: float = 0.4) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One harmonic sound after another."""
    time = np.arange(int(seconds * RATE)) / RATE
    sounds = [sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 9)) for pitch in pitches]
    return np.asarray(0.2 * np.concatenate(sounds), np.float32)


def test_equal_recordings_are_not_apart() -> None:
    sound = tones(120, 180, 150)
    assert mel_distance(sound, sound, RATE) == pytest.approx(0, abs=1e-3)
    assert snr(sound, sound, RATE) == EXACT_DB


def test_a_gain_is_its_decibels() -> None:
    sound = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    assert mel_distance(sound, sound * np.float32(0.5), RATE) == pytest.approx(6.02, abs=0.5)
    assert snr(sound, sound * np.float32(0.9), RATE) == pytest.approx(20, abs=1e-3)


def test_warping_forgives_tempo_and_not_another_sound() -> None:
    sound, slower = tones(120, 180, 150), tones(120, 180, 150, seconds=0.5)
    assert mel_distance(sound, slower, RATE) < 0.3 * mel_distance(sound, tones(250, 90, 310), RATE)


def test_a_shift_is_found() -> None:
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 0.1, RATE).astype(np.float32)
    assert snr(sound, sound[300:], RATE) == EXACT_DB
    assert snr(sound[300:], sound, RATE) == EXACT_DB
    assert abs(snr(sound, rng.normal(0, 0.1, RATE).astype(np.float32), RATE) + 3.01) < 0.5


def test_the_path_is_the_cheapest_of_all() -> None:
    """Against the plain recursion, cell by cell."""
    cost = np.random.default_rng(1).random((7, 5))
    table: dict[tuple[int, int], tuple[float, int]] = {}
    for i in range(7):
        for j in range(5):
            before = [table[p] for p in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if p in table] or [(0.0, 0)]
            total, length = min(before)
            table[i, j] = total + cost[i, j], length + 1
    assert warped_mean(cost) == pytest.approx(table[6, 4][0] / table[6, 4][1])


def test_a_recording_shorter_than_a_window_counts() -> None:
    assert np.isfinite(mel_distance(tones(120)[:50], tones(120), RATE))
