"""Mel filter banks and Kaldi's frame preparation as float64 matrices, the constants of the features."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_SLANEY_LINEAR = 200 / 3  # Hz per mel below the break
_SLANEY_BREAK = 1000.0  # Hz, above it the scale is logarithmic
_SLANEY_LOG_STEP = np.log(6.4) / 27


def kaldi_frame(size: int, pre_emphasis: float) -> Array:
    """What Kaldi does to a frame before its Fourier transform, as a matrix [size, size].

    It removes the frame's mean, emphasises high frequencies and applies the Povey window, a symmetric Hann
    window to the power of 0.85. All of it is linear. The first sample has no predecessor to be emphasised
    against, and needs none: the window is zero there.
    """
    centre = np.eye(size) - 1 / size
    emphasis = np.eye(size) - pre_emphasis * np.eye(size, k=-1)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85
    return np.asarray(window[:, None] * (emphasis @ centre))


def slaney_filters(
    sample_rate: int, n_fft: int, bins: int, low: float = 0, high: float | None = None
) -> Array:
    """Area-normalised triangles on Slaney's mel scale [bins, n_fft // 2 + 1].

    The bank of Slaney's Auditory Toolbox, which Whisper and HiFi-GAN's mel spectrogram use.
    `low`, `high` in Hz; no `high` means half the sample rate.
    """
    edges = np.linspace(_slaney_mel(low), _slaney_mel(high or sample_rate / 2), bins + 2)
    hertz = np.asarray([_slaney_hertz(mel) for mel in edges])
    frequencies = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    return np.asarray(_triangles(frequencies, hertz) * (2 / (hertz[2:] - hertz[:-2]))[:, None])


def kaldi_filters(sample_rate: int, n_fft: int, bins: int, low: float = 20) -> Array:
    """Kaldi's triangles [bins, n_fft // 2 + 1], straight in mel and of height one, up to half the rate.

    The bin at half the sample rate has no weight.
    """
    edges = np.linspace(_kaldi_mel(np.asarray(low)), _kaldi_mel(np.asarray(sample_rate / 2)), bins + 2)
    frequencies = np.linspace(0, sample_rate / 2, n_fft // 2 + 1)
    filters = _triangles(_kaldi_mel(frequencies), edges)
    filters[:, -1] = 0
    return filters


def _triangles(points: Array, edges: Array) -> Array:
    rising = (points - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - points) / np.diff(edges)[1:, None]
    return np.asarray(np.maximum(0, np.minimum(rising, falling)))


def _slaney_mel(hertz: float) -> float:
    if hertz < _SLANEY_BREAK:
        return hertz / _SLANEY_LINEAR
    return float(_SLANEY_BREAK / _SLANEY_LINEAR + np.log(hertz / _SLANEY_BREAK) / _SLANEY_LOG_STEP)


def _slaney_hertz(mel: float) -> float:
    if mel < _SLANEY_BREAK / _SLANEY_LINEAR:
        return mel * _SLANEY_LINEAR
    return float(_SLANEY_BREAK * np.exp((mel - _SLANEY_BREAK / _SLANEY_LINEAR) * _SLANEY_LOG_STEP))


def _kaldi_mel(hertz: Array) -> Array:
    return np.asarray(1127 * np.log1p(hertz / 700))
