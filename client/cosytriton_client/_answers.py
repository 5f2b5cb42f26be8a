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
from cosytriton_ensemble import names


def encoded_voice(tensors: Tensors) -> EncodedVoice:
    """The answer of `voice_encoder`; read-only, because it is shared by later calls."""
    arrays = {name: _output(tensors, name) for name in EncodedVoice.__slots__}
    for name, array in arrays.items():
        if array.dtype != np.object_ and not np.isfinite(array).all():
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
    peak: float = 0.0

    def chunk(self, tensors: Tensors) -> Audio:
        """The next part: `waveform` [1, n], its valid samples, and where it stands in the whole."""
        waveform = _output(tensors, names.WAVEFORM)[0]
        count, tokens, offset, rate = (
            int(_output(tensors, name).item())
            for name in (names.SAMPLE_COUNT, names.TOKEN_COUNT, names.SAMPLE_OFFSET, names.SAMPLE_RATE)
        )
        if not 0 <= count <= len(waveform) or tokens < 0 or rate <= 0:
            raise BadAnswerError(
                f"{count} samples of {tokens} tokens at {rate} Hz in a waveform of {len(waveform)} samples."
            )
        if offset != self.samples:
            raise BadAnswerError(
                f"the next chunk begins at sample {offset}, but {self.samples} were heard: audio was lost "
                "or added."
            )
        samples = waveform[:count].astype(np.float32)
        if not np.isfinite(samples).all():
            raise BadAnswerError("the speech has NaN or infinite samples.")
        self.samples += count
        self.peak = max(self.peak, float(np.abs(samples).max(initial=0)))
        return Audio(samples, tokens, rate, _text(_output(tensors, names.FINISH_REASON)))

    def check_whole(self) -> None:
        """Raise `BadAnswerError` unless something was spoken."""
        if self.samples == 0:
            raise BadAnswerError("the server answered without any audio.")
        if self.peak < SILENCE:
            raise BadAnswerError(f"the speech is silent (peak {self.peak:.1g} of 1).")


def _text(array: npt.NDArray[Any]) -> str:
    value = array.item()
    return value.decode() if isinstance(value, bytes) else str(value)


def _output(tensors: Tensors, name: str) -> npt.NDArray[Any]:
    if name not in tensors:
        raise BadAnswerError(f"the answer lacks {name!r}; it has {sorted(tensors)}.")
    return tensors[name]
