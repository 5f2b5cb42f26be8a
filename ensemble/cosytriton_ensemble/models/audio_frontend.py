"""`audio_frontend`: a reference recording at any rate -> the waveforms that the voice stages hear."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosytriton_ensemble.audio import Waveform, check_reference, resample
from cosytriton_ensemble.models.requests import answer, scalar
from cosytriton_ensemble.pipeline import (
    ANALYSIS_RATE,
    AUDIO,
    AUDIO_FRONTEND,
    COSYVOICE2,
    COUNT_16K,
    COUNT_24K,
    SAMPLE_RATE,
    SAMPLES_16K,
    SAMPLES_24K,
    WAVEFORM_16K,
    WAVEFORM_24K,
)
from cosytriton_ensemble.spec import Dim, Feed


def prepare(feed: Feed) -> Feed:
    """Audio [samples], sample_rate [1] -> 16 kHz and 24 kHz waveforms, padded to the grid, and counts."""
    audio: Waveform = feed[AUDIO.name]
    rate = scalar(feed, SAMPLE_RATE.name)
    check_reference(audio, rate)
    low, low_count = _padded(resample(audio, rate, ANALYSIS_RATE), SAMPLES_16K)
    high, high_count = _padded(resample(audio, rate, COSYVOICE2.sample_rate), SAMPLES_24K)
    return {
        WAVEFORM_16K.name: low,
        COUNT_16K.name: low_count,
        WAVEFORM_24K.name: high,
        COUNT_24K.name: high_count,
    }


def _padded(audio: Waveform, dim: Dim) -> tuple[Waveform, np.ndarray[Any, Any]]:
    count = audio.size
    return np.pad(audio, (0, dim.padded(count) - count)), np.array([count], np.int32)


class TritonPythonModel:
    """Stateless."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return answer(requests, AUDIO_FRONTEND, prepare)
