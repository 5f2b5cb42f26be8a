"""A voice: a few seconds of somebody's speech and what is said in them; and its encoded form."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from cosytriton_client._audio import SILENCE, Samples, read_audio
from cosytriton_client._errors import InvalidInputError
from cosytriton_client._transport import Tensors
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, MAX_REFERENCE_SECONDS, SAMPLES_16K

MIN_SECONDS = SAMPLES_16K.min / ANALYSIS_RATE  # 0.25
_MAX_OVERSHOOT = 2.0  # a decoder may exceed full scale a little; beyond this it is no audio in [-1, 1]
_MAX_CHANNELS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A reference voice.

    Attributes:
        audio: float samples [n] or [n, channels] in [-1, 1]; kept as float32 mono (the mean) [n].
        sample_rate: Hz, 16,000 or more.
        transcript: what is said in the audio; without it the voice speaks in the mode "cross_lingual".
        digest: sha256 of the samples and the rate; the name under which its encoding is cached.

    Raises:
        InvalidInputError: no voice can be taken from it; the message says why.
    """

    audio: npt.NDArray[np.floating[Any]]
    sample_rate: int
    transcript: str = ""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        audio = _mono(np.asarray(self.audio))
        _check(audio, self.sample_rate)
        audio = np.clip(audio, -1, 1)
        audio.setflags(write=False)
        object.__setattr__(self, "audio", audio)
        content = hashlib.sha256(f"{self.sample_rate} Hz\n".encode())
        content.update(audio.tobytes())
        object.__setattr__(self, "digest", content.hexdigest())

    @classmethod
    def from_wav(cls, path: str | os.PathLike[str], transcript: str = "") -> Voice:
        """Read a WAV file (PCM of 8 to 32 bits), or with `cosytriton[audio]` any usual audio file.

        Raises:
            InvalidInputError: the file is missing, empty, damaged or no voice.
            UnsupportedError: the format needs `cosytriton[audio]`.
        """
        audio, sample_rate = read_audio(Path(path))
        try:
            return cls(audio, sample_rate, transcript)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None

    @property
    def seconds(self) -> float:
        """The duration of the audio."""
        return len(self.audio) / self.sample_rate


def _mono(audio: npt.NDArray[Any]) -> Samples:
    if audio.dtype.kind != "f":
        raise InvalidInputError(
            f"audio of {audio.dtype}: give floats in [-1, 1] (divide int16 samples by 32768)."
        )
    if audio.ndim == 2 and 1 <= audio.shape[1] <= _MAX_CHANNELS:
        audio = audio.mean(axis=1)  # [n, channels] -> [n]
    if audio.ndim != 1:
        raise InvalidInputError(
            f"audio of shape {list(audio.shape)}: give [n] or [n, channels], 1 to {_MAX_CHANNELS} channels."
        )
    return np.array(audio, np.float32)  # a copy: what the caller does with theirs must not change a voice


def _check(audio: Samples, sample_rate: int) -> None:
    if sample_rate < ANALYSIS_RATE:
        raise InvalidInputError(
            f"reference audio of {sample_rate} Hz: the voice is analysed at {ANALYSIS_RATE} Hz, which a "
            "lower rate cannot fill. Give a recording of 16 kHz or more (a resampled one stays dull)."
        )
    seconds = len(audio) / sample_rate
    if not MIN_SECONDS <= seconds <= MAX_REFERENCE_SECONDS:
        raise InvalidInputError(
            f"reference audio of {seconds:.4g} s: allowed are {MIN_SECONDS:g} to {MAX_REFERENCE_SECONDS} s, "
            "best are 3 to 10 s."
        )
    if not np.isfinite(audio).all():
        raise InvalidInputError("reference audio with NaN or infinite samples: read the recording again.")
    peak = float(np.abs(audio).max())
    if peak < SILENCE:
        raise InvalidInputError(f"reference audio is silent (peak {peak:.1g} of 1): give one with speech.")
    if peak > _MAX_OVERSHOOT:
        raise InvalidInputError(f"reference audio has a peak of {peak:g}: scale the samples to [-1, 1].")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedVoice:
    """What the server hears in a voice. Tokens and mel are padded; the counts say what is valid.

    Attributes:
        prompt_tokens: int32 [1, k], speech tokens.
        prompt_token_count: int32 [1, 1].
        prompt_mel: float32 [1, frames, 80], log-mel frames.
        prompt_frame_count: int32 [1, 1].
        speaker_embedding: float32 [1, 192].
        checkpoint: bytes [1, 1], hash of the checkpoint that encoded it; no other one understands it.
    """

    prompt_tokens: npt.NDArray[np.int32]
    prompt_token_count: npt.NDArray[np.int32]
    prompt_mel: npt.NDArray[np.float32]
    prompt_frame_count: npt.NDArray[np.int32]
    speaker_embedding: npt.NDArray[np.float32]
    checkpoint: npt.NDArray[np.object_]

    def tensors(self) -> Tensors:
        """The tensors by the names that the server gives and takes."""
        return {name: getattr(self, name) for name in self.__slots__}


class VoiceCache:
    """Encoded voices by digest, the most recently used `size` of them; safe for threads.

    Two threads that ask for one voice at the same time share one encoding.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._voices: OrderedDict[str, Future[EncodedVoice]] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def forgotten_when_refused(self) -> Iterator[None]:
        """Forget all voices when the server refuses them: it may serve another checkpoint now."""
        try:
            yield
        except InvalidInputError as error:
            if "another checkpoint" in str(error):
                with self._lock:
                    self._voices.clear()
            raise

    def get(self, digest: str, encode: Callable[[], EncodedVoice]) -> EncodedVoice:
        """The cached voice, or the result of `encode`, which is then kept."""
        with self._lock:
            known = self._voices.get(digest)
            future = self._voices.setdefault(digest, known or Future())
            self._voices.move_to_end(digest)
            while len(self._voices) > self._size:
                self._voices.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            future.set_result(encode())
        except BaseException as error:
            with self._lock:  # a failure is not kept: the next call tries again
                if self._voices.get(digest) is future:
                    del self._voices[digest]
            future.set_exception(error)
            raise
        return future.result()
