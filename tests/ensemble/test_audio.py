"""The reference recording: official resampling, and refusals that say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cosytriton_ensemble.audio import RATES, check_reference, resample
from cosytriton_ensemble.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import Golden

TOLERANCE = 5e-6  # float32 sums over up to 500 taps
TONE_TOLERANCE = 1e-3  # of a window of 6 zero crossings
HERTZ = {"16k": 16_000, "24k": 24_000, "44k": 44_100, "48k": 48_000}
SAMPLES = {"16k": 3200, "24k": 4800, "44k": 8820, "48k": 9600}  # 0.2 s


@pytest.mark.parametrize("source", HERTZ)
@pytest.mark.parametrize("target", ["16k", "24k"])
def test_resampling_is_the_official_one(golden: Callable[[str], Golden], source: str, target: str) -> None:
    official = golden("frontend")
    wave = official[f"wav{source[:2]}"][0, : SAMPLES[source]]
    resampled = resample(wave, HERTZ[source], HERTZ[target])
    if source == target:
        np.testing.assert_array_equal(resampled, wave)
    else:
        official.assert_close(f"rs_{source}_{target}", resampled[None], atol=TOLERANCE)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("wanted", [16_000, 22_050, 24_000])
def test_every_allowed_rate_reaches_every_model(rate: int, wanted: int) -> None:
    """A tone keeps its pitch, its level and its length."""
    time, expected = np.arange(rate // 4) / rate, np.arange(-(-wanted // 4)) / wanted
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    resampled = resample(tone, rate, wanted)
    assert abs(len(resampled) - wanted / 4) <= 1
    middle = slice(wanted // 50, -wanted // 50)
    size = min(len(resampled), len(expected))
    error = resampled[:size] - np.sin(2 * np.pi * 440 * expected[:size])
    assert np.abs(error[middle]).max() < TONE_TOLERANCE


def test_resampling_keeps_a_tone_and_removes_what_would_alias() -> None:
    time = np.arange(44_100) / 44_100
    low, high = (np.sin(2 * np.pi * f * time).astype(np.float32) for f in (1_000, 12_000))
    expected = np.sin(2 * np.pi * 1_000 * np.arange(16_000) / 16_000)
    middle = slice(1_000, -1_000)
    assert np.abs(resample(low, 44_100, 16_000) - expected)[middle].max() < 1e-3
    assert np.abs(resample(high, 44_100, 16_000))[middle].max() < 5e-3


def _speech(seconds: float, rate: int = 16_000) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(0, 0.1, int(seconds * rate)).astype(np.float32)


NAN = _speech(1)
NAN[5] = np.nan


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (_speech(3, 8_000), 8_000, "8000 Hz; .*16000 Hz or more"),
        (_speech(1), 17_321, "17321 Hz; allowed are 16000, "),
        (_speech(0), 16_000, "0.00 s long .0 samples.; allowed are 0.25 to 30 s"),
        (_speech(0.05), 16_000, "0.05 s long"),
        (_speech(31), 16_000, "31.00 s long"),
        (NAN, 16_000, "NaN or infinite"),
        (np.zeros(16_000, np.float32), 16_000, "silent"),
        (_speech(1) * 32_768, 16_000, "not be integers"),
    ],
)
def test_what_cannot_be_a_voice_is_refused_with_the_reason(
    audio: np.ndarray[tuple[int], np.dtype[np.float32]], rate: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_reference(audio, rate)


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 44_100, 48_000])
def test_usual_recordings_are_accepted(rate: int) -> None:
    check_reference(_speech(5, rate), rate)
