"""Distances between what FP32 computes and what a variant computes: numpy alone, float64 inside.

Each takes the valid entries of one row, `reference` and `variant` of equal shape, and returns values that
are gathered over all rows; `mean`, `percent`, `smallest` and `decibels` make one figure of the gathered ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Values = npt.NDArray[np.float64]

DECIBELS_PER_NEPER = 20 / np.log(10)  # log-mels are natural logarithms of amplitudes
EXACT_DB = 200.0  # an SNR beyond the rounding of float32: equal. Finite, so that JSON can hold it
WINDOW, HOP = 1024, 256  # samples of a short-time spectrum: 43 and 11 ms at 24 kHz
FLOOR = 1e-4  # of the peak, -80 dB: what lies below is not heard beside it
TINY = float(np.finfo(np.float64).tiny)  # stands for silence under a logarithm


def powers(reference: Array, variant: Array) -> Values:
    """Energy of the signal and of the error, [1, 2], for `decibels`."""
    signal = reference.astype(np.float64)
    return np.array([[np.sum(signal**2), np.sum((variant - signal) ** 2)]])


def cosine(reference: Array, variant: Array) -> Values:
    """Cosine between two vectors [width], as [1]; what speaker similarity is measured with."""
    a, b = reference.astype(np.float64), variant.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a zero vector has no direction: NaN
        return np.array([a @ b / np.sqrt((a @ a) * (b @ b))])


def equal_ids(reference: Array, variant: Array) -> Values:
    """1 where two ids are equal, else 0: [tokens]."""
    return np.asarray(reference == variant, np.float64)


def equal_choice(reference: Array, variant: Array) -> Values:
    """1 where the most probable id of the logits [ids] is the same, else 0: [1]."""
    return np.array([float(reference.argmax() == variant.argmax())])


def divergence(reference: Array, variant: Array) -> Values:
    """Kullback-Leibler divergence in nats of the variant's softmax from FP32's, for logits [ids]: [1]."""
    p, q = _log_softmax(reference), _log_softmax(variant)
    return np.array([np.sum(np.exp(p) * (p - q))])


def _log_softmax(logits: Array) -> Values:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def mel_distance(reference: Array, variant: Array) -> Values:
    """Mean absolute difference in dB of two log-mels [frames, bins], of each frame: [frames]."""
    difference = np.abs(variant.astype(np.float64) - reference)
    return np.asarray(DECIBELS_PER_NEPER * difference.mean(axis=1))


def log_spectral_distance(reference: Array, variant: Array) -> Values:
    """Rms difference in dB of two short-time spectra of waveforms [samples], of each window: [windows].

    The log spectral distance of Gray and Markel (1976), on amplitudes not below 80 dB under the peak of
    `reference`. It does not hear the phase, which a tiny error of pitch turns round after a second.
    """
    ours = spectrum(reference)
    peak = max(float(ours.max()), TINY / FLOOR)
    a, b = (20 * np.log10(np.maximum(s, FLOOR * peak)) for s in (ours, spectrum(variant)))
    return np.asarray(np.sqrt(np.mean((a - b) ** 2, axis=1)))


def spectrum(waveform: Array) -> Values:
    """Amplitudes [windows, WINDOW / 2 + 1] of Hann windows of a waveform [samples]; a short one is padded."""
    padded = np.pad(waveform.astype(np.float64), (0, max(0, WINDOW - waveform.size)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    return np.asarray(np.abs(np.fft.rfft(frames * np.hanning(WINDOW), axis=1)))


def mean(values: Values) -> float:
    """The mean."""
    return float(values.mean())


def percent(values: Values) -> float:
    """The mean of zeros and ones, in percent."""
    return 100 * mean(values)


def smallest(values: Values) -> float:
    """The smallest."""
    return float(values.min())


def decibels(values: Values) -> float:
    """Signal-to-noise ratio in dB of `powers` [rows, 2]; at most `EXACT_DB` either way."""
    signal, noise = values.sum(axis=0)
    if not np.isfinite(noise):
        return -EXACT_DB
    if noise == 0:
        return EXACT_DB
    return float(np.clip(10 * np.log10(max(signal, TINY) / noise), -EXACT_DB, EXACT_DB))
