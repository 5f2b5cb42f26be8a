"""The reference recording: official resampling, and refusals that say why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cosytriton_ensemble.audio import check_reference, resample
from cosytriton_ensemble.errors import InputError

GOLDEN = Path(__file__).parents[1] / "golden" / "frontend.safetensors"
TOLERANCE = 5e-6  # float32 sums over up to 500 taps
# name of the golden result -> source, how much of it, rates
CASES = [key for key in load_file(GOLDEN) if key.startswith("rs_")]


@pytest.mark.parametrize("case", CASES)
def test_resampling_is_the_official_one(case: str) -> None:
    golden = load_file(GOLDEN)
    _, source, target = case.split("_")
    wave = golden[f"wav{source[:2]}"][0]
    cut = {"24": 4800, "16": 3200}.get(source[:2])
    rate, wanted = _hertz(source), _hertz(target)
    assert np.abs(resample(wave[:cut], rate, wanted) - golden[case].reshape(-1)).max() < TOLERANCE


def _hertz(label: str) -> int:
    digits = label.rstrip("k")
    return {"16": 16_000, "22": 22_050, "24": 24_000, "44": 44_100, "48": 48_000}.get(digits) or int(digits)


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
