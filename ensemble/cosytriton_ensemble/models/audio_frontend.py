"""`audio_frontend`: a reference recording at any rate -> the waveforms that the voice stages hear."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.audio import Waveform, check_reference, resample
from cosytriton_ensemble.models.requests import answer
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, SAMPLES_16K
from cosytriton_ensemble.spec import Dim, Feed
from cosytriton_ensemble.utterance import number_of


class TritonPythonModel:
    """Stateless but for the checkpoint's hash, which goes with every voice."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read which checkpoint is served."""
        setting = Setting.of(args)
        self._pipeline = setting.pipeline
        self._checkpoint = np.array([setting.checkpoint.encode()], np.object_)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return answer(requests, self._pipeline.audio_frontend, self._prepare)

    def _prepare(self, feed: Feed) -> Feed:
        """Resample audio [samples] to both rates, padded to the grid."""
        audio: Waveform = feed[names.AUDIO]
        rate = int(number_of(feed, names.SAMPLE_RATE, 0))
        check_reference(audio, rate)
        low, low_count = _padded(resample(audio, rate, ANALYSIS_RATE), SAMPLES_16K)
        wanted, dim = self._pipeline.family.sample_rate, self._pipeline.samples_model
        high, high_count = _padded(resample(audio, rate, wanted), dim)
        return {
            names.WAVEFORM_16K: low,
            names.SAMPLE_COUNT_16K: low_count,
            names.WAVEFORM_MODEL: high,
            names.SAMPLE_COUNT_MODEL: high_count,
            names.CHECKPOINT: self._checkpoint,
        }


def _padded(audio: Waveform, dim: Dim) -> tuple[Waveform, np.ndarray[Any, Any]]:
    count = audio.size
    return np.pad(audio, (0, dim.padded(count) - count)), np.array([count], np.int32)
