"""Answers of the server become audio, or an error: NaN, silence and a wrong length are not speech."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cosytriton_client._audio import SILENCE, Audio
from cosytriton_client._errors import BadAnswerError
from cosytriton_client._transport import Tensors
from cosytriton_client._voice import EncodedVoice
from cosytriton_ensemble.pipeline import COSYVOICE2


def encoded_voice(tensors: Tensors) -> EncodedVoice:
    """The answer of `voice_encoder`; read-only, because it is shared by later calls."""
    arrays = {name: _output(tensors, name) for name in EncodedVoice.__slots__}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise BadAnswerError(f"the encoded voice has NaN or infinite values in {name!r}.")
        array.setflags(write=False)
    return EncodedVoice(**arrays)


def whole_speech(tensors: Tensors) -> Audio:
    """The answer of `tts`."""
    speech = Speech()
    audio = speech.chunk(tensors)
    speech.check_whole()
    return audio


@dataclass(slots=True)
class Speech:
    """What has been heard of one request so far."""

    samples: int = 0
    tokens: int = 0
    peak: float = 0.0

    def chunk(self, tensors: Tensors) -> Audio:
        """The next part: `waveform` [1, n] without its padding, `sample_count` and `token_count` [1, 1]."""
        waveform = _output(tensors, "waveform")[0]
        count, tokens = (int(_output(tensors, name).item()) for name in ("sample_count", "token_count"))
        if not 0 <= count <= len(waveform) or tokens < 0:
            raise BadAnswerError(
                f"{count} samples of {tokens} tokens in a waveform of {len(waveform)} samples."
            )
        samples = waveform[:count].astype(np.float32)
        if not np.isfinite(samples).all():
            raise BadAnswerError("the speech has NaN or infinite samples.")
        self.samples += count
        self.tokens += tokens
        self.peak = max(self.peak, float(np.abs(samples).max(initial=0)))
        return Audio(samples, tokens)

    def check_whole(self) -> None:
        """Raise `BadAnswerError` unless all of it is speech of the right length."""
        expected = self.tokens * COSYVOICE2.samples_per_token
        if self.samples == 0:
            raise BadAnswerError("the server answered without any audio.")
        if self.samples != expected:
            raise BadAnswerError(
                f"{self.samples} samples of {self.tokens} speech tokens, which are {expected} samples: "
                "audio was lost or added."
            )
        if self.peak < SILENCE:
            raise BadAnswerError(f"the speech is silent (peak {self.peak:.1g} of 1).")


def _output(tensors: Tensors, name: str) -> npt.NDArray[Any]:
    if name not in tensors:
        raise BadAnswerError(f"the answer lacks {name!r}; it has {sorted(tensors)}.")
    return tensors[name]
