"""How far two recordings of speech are from each other: numpy alone, float64 inside."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]

BANDS = 80
WINDOW_SECONDS, HOP_SECONDS = 0.05, 0.0125
RANGE_DB = 60.0  # below the louder one's peak: what is fainter is not heard beside it
LAG_SECONDS = 0.05  # by which one recording may begin later
EXACT_DB = 200.0  # SNR of equal waveforms; finite, so that JSON can hold it


def mel_distance(one: Samples, other: Samples, rate: int) -> float:
    """Difference in dB of two log-mel spectrograms, aligned in time: 0 for equal ones.

    Rms over the bands, mean over the cheapest path of dynamic time warping (Sakoe and Chiba, 1978), as mel
    cepstral distortion with warping is computed (Kubichek, 1993).

    The recordings are float32 [n] in [-1, 1], each of any length above 0; `rate` is in Hz.
    """
    spectra = [log_mel(samples, rate) for samples in (one, other)]
    floor = max(float(spectrum.max()) for spectrum in spectra) - RANGE_DB
    a, b = (np.maximum(spectrum, floor) for spectrum in spectra)
    squares = np.sum(a**2, axis=1)[:, None] + np.sum(b**2, axis=1) - 2 * a @ b.T
    return warped_mean(np.sqrt(np.maximum(squares, 0) / BANDS))


def warped_mean(cost: Values) -> float:
    """Mean of `cost` [n, m] along the path from corner to corner whose sum is least."""
    n, m = cost.shape
    total, length = np.full((n + 1, m + 1), np.inf), np.zeros((n + 1, m + 1))
    total[0, 0] = 0.0
    for diagonal in range(2, n + m + 1):  # cells of an anti-diagonal do not depend on each other
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        before = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        steps = np.stack([length[i - 1, j - 1], length[i - 1, j], length[i, j - 1]])
        best = before.argmin(axis=0), np.arange(i.size)
        total[i, j], length[i, j] = before[best] + cost[i - 1, j - 1], steps[best] + 1
    return float(total[n, m] / length[n, m])


def snr(signal: Samples, other: Samples, rate: int) -> float:
    """Signal-to-noise ratio in dB of `other`, moved by at most 50 ms to where it fits best.

    Says something where both say the same tokens: other tokens, or another phase, give about 0.
    """
    size = max(signal.size, other.size)
    spectrum = np.fft.rfft(signal, 2 * size) * np.conj(np.fft.rfft(other, 2 * size))
    correlation = np.fft.irfft(spectrum)
    lags = np.arange(-round(LAG_SECONDS * rate), round(LAG_SECONDS * rate) + 1)
    lag = int(lags[correlation[lags].argmax()])
    a, b = signal[max(0, lag) :], other[max(0, -lag) :]
    a, b = a[: b.size].astype(np.float64), b[: a.size].astype(np.float64)
    power, noise = float(np.sum(a**2)), float(np.sum((a - b) ** 2))
    if not noise or not power:
        return EXACT_DB if not noise else -EXACT_DB
    return float(np.clip(10 * np.log10(power / noise), -EXACT_DB, EXACT_DB))


def log_mel(samples: Samples, rate: int) -> Values:
    """Mel spectrogram in dB [frames, BANDS]; a short recording is padded to one window."""
    window, hop = round(WINDOW_SECONDS * rate), round(HOP_SECONDS * rate)
    padded = np.pad(samples.astype(np.float64), (0, max(0, window - samples.size)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * np.hanning(window)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2 @ _bands(window, rate)
    return np.asarray(10 * np.log10(power + 1e-10))


@lru_cache(4)
def _bands(window: int, rate: int) -> Values:
    """Triangles on the mel scale of HTK, [window / 2 + 1, BANDS]."""
    frequencies = np.fft.rfftfreq(window, 1 / rate)
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), BANDS + 2) / 2595) - 1)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rise = (frequencies[:, None] - low) / (centre - low)
    fall = (high - frequencies[:, None]) / (high - centre)
    return np.asarray(np.maximum(0, np.minimum(rise, fall)))
