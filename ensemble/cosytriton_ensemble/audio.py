"""The reference recording: what is accepted, and how it is resampled (numpy only).

The resampler is the windowed sinc of torchaudio's `Resample` defaults (Hann window, 6 zero crossings,
roll-off 0.99), since that is what the official front end hears.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, MAX_REFERENCE_SECONDS

Waveform = npt.NDArray[np.float32]

RATES = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 176_400, 192_000)  # Hz
MIN_REFERENCE_SECONDS = 0.25
SILENCE = 1e-3  # peak amplitude, -60 dB of full scale
ZERO_CROSSINGS = 6
ROLL_OFF = 0.99


def check_reference(audio: Waveform, rate: int) -> None:
    """Raise InputError unless `audio` [samples] at `rate` Hz can be a reference voice."""
    if rate < ANALYSIS_RATE:
        raise InputError(
            f"The reference audio has a sample rate of {rate} Hz; the speaker and token encoders need "
            f"{ANALYSIS_RATE} Hz or more. Record it again: upsampling does not bring the voice back."
        )
    if rate not in RATES:
        allowed = ", ".join(map(str, RATES))
        raise InputError(f"The reference audio has a sample rate of {rate} Hz; allowed are {allowed}.")
    seconds = audio.size / rate
    if not MIN_REFERENCE_SECONDS <= seconds <= MAX_REFERENCE_SECONDS:
        raise InputError(
            f"The reference audio is {seconds:.2f} s long ({audio.size} samples); allowed are "
            f"{MIN_REFERENCE_SECONDS} to {MAX_REFERENCE_SECONDS} s. 3 to 10 s of clean speech work best."
        )
    if not np.isfinite(audio).all():
        raise InputError(
            "The reference audio holds NaN or infinite samples; allowed are finite ones in [-1, 1]."
        )
    peak = float(np.abs(audio).max())
    if peak < SILENCE:
        raise InputError(
            f"The reference audio is silent (peak {peak:.1e} of full scale 1). Give one with speech."
        )
    if peak > 2:
        raise InputError(
            f"The reference audio reaches {peak:.0f}; samples must lie in [-1, 1], not be integers."
        )


def resample(audio: Waveform, rate: int, wanted: int) -> Waveform:
    """`audio` [samples] at `rate` Hz as [ceil(samples * wanted / rate)] at `wanted` Hz."""
    if rate == wanted:
        return audio
    divisor = math.gcd(rate, wanted)
    old, new = rate // divisor, wanted // divisor
    kernels, width = _kernels(old, new)
    padded = np.pad(audio, (width, width + old))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernels.shape[1])[::old]  # [steps, taps]
    resampled = (windows @ kernels.T).reshape(-1)  # `new` output phases for each step of `old` samples
    return np.ascontiguousarray(resampled[: math.ceil(new * audio.size / old)])


@lru_cache(maxsize=16)
def _kernels(old: int, new: int) -> tuple[Waveform, int]:
    """One windowed sinc for each output phase, [new, taps], and the taps before the current sample."""
    cutoff = min(old, new) * ROLL_OFF
    width = math.ceil(ZERO_CROSSINGS * old / cutoff)
    taps = np.arange(-width, width + old) / old
    phases = -np.arange(new)[:, None] / new
    time = np.clip((phases + taps) * cutoff, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(time * np.pi / ZERO_CROSSINGS / 2) ** 2
    return (np.sinc(time) * window * (cutoff / old)).astype(np.float32), width
