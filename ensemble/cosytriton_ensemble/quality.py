"""Is a recording a good reference? Warnings that say what to record instead."""

from __future__ import annotations

import numpy as np

from cosytriton_ensemble.audio import Waveform, resample
from cosytriton_ensemble.pipeline import ANALYSIS_RATE

SHORT_SECONDS, LONG_SECONDS = 3.0, 15.0
CLIPPED_LEVEL, CLIPPED_SHARE = 0.985, 1e-3  # of full scale; of all samples
QUIET_LEVEL = 0.01  # rms of the loud half of the frames, -40 dB of full scale
PAUSE_LEVEL = 0.1  # a frame 20 dB below the loud ones is a pause
PAUSE_SHARE = 0.5  # of the frames
EDGE_SECONDS = 1.0  # of silence before or after the speech
FRAME_SECONDS = 0.04
VOICED_CORRELATION = 0.5  # of a frame with itself one pitch period later
VOICED_SHARE = 0.15  # of the loud frames
PITCH = 70, 400  # Hz


def reference_warnings(audio: Waveform, rate: int) -> list[str]:
    """What is wrong with a reference [samples] at `rate` Hz that can be used all the same; best is none."""
    warnings = []
    seconds = audio.size / rate
    if seconds < SHORT_SECONDS:
        warnings.append(
            f"it is {seconds:.1f} s long: record 3 to 10 s, a short one catches less of the voice"
        )
    if seconds > LONG_SECONDS:
        warnings.append(f"it is {seconds:.1f} s long: 3 to 10 s do, and every request pays for the rest")
    clipped = float(np.mean(np.abs(audio) > CLIPPED_LEVEL))
    if clipped > CLIPPED_SHARE:
        warnings.append(f"{clipped:.1%} of its samples are clipped: record again with less gain")
    return warnings + _speech_warnings(resample(audio, rate, ANALYSIS_RATE))


def _speech_warnings(audio: Waveform) -> list[str]:
    """Warnings about loudness and content; audio at 16 kHz."""
    size = int(FRAME_SECONDS * ANALYSIS_RATE)
    frames = audio[: audio.size // size * size].reshape(-1, size)
    level = np.sqrt(np.mean(np.square(frames, dtype=np.float64), axis=1))
    loud = float(np.median(level[level >= np.median(level)]))
    speaking = level > PAUSE_LEVEL * loud
    warnings = []
    if loud < QUIET_LEVEL:
        warnings.append("it is very quiet: record again closer to the microphone or with more gain")
    if not speaking.any() or speaking.mean() < 1 - PAUSE_SHARE:
        warnings.append(
            f"{1 - speaking.mean():.0%} of it is silence: cut the pauses, or record speech without"
        )
    elif (edge := _edge_seconds(speaking)) > EDGE_SECONDS:
        warnings.append(f"it has {edge:.1f} s of silence at an end: cut it off")
    voiced = _voiced(frames[speaking]) if speaking.any() else np.zeros(1)
    if voiced.mean() < VOICED_SHARE:
        warnings.append("no voice was found in it: give a recording of one person who speaks, without music")
    return warnings


def _edge_seconds(speaking: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """The longer one of the pauses at both ends, in seconds."""
    first, last = np.flatnonzero(speaking)[[0, -1]]
    return float(max(first, len(speaking) - 1 - last)) * FRAME_SECONDS


def _voiced(frames: Waveform) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which frames [n, size] repeat themselves after one period of a human pitch (by autocorrelation)."""
    frames = frames - frames.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(frames, 2 * frames.shape[1], axis=1)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)
    lags = slice(ANALYSIS_RATE // PITCH[1], ANALYSIS_RATE // PITCH[0])
    # A window that gets shorter with the lag would correlate less: compare with what it could reach.
    overlap = 1 - np.arange(frames.shape[1]) / frames.shape[1]
    peak = (correlation[:, lags] / overlap[lags]).max(axis=1)
    voiced: np.ndarray[tuple[int], np.dtype[np.bool_]] = peak > VOICED_CORRELATION * (
        correlation[:, 0] + 1e-12
    )
    return voiced
