"""An encoded voice: what a caller sends or a folder holds, and the checks between it and the graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.pipeline import MEL_BINS, SPEAKER_SIZE, pipeline_of
from cosytriton_ensemble.spec import Array, Feed

NO_TOKENS = np.zeros(0, np.int32)
NO_MEL = np.zeros((0, MEL_BINS), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A voice without padding. A speaker embedding alone is a voice too (mode `sft`)."""

    speaker: Array  # FP32 [192]
    tokens: Array = field(default_factory=lambda: NO_TOKENS)  # INT32 [n], speech tokens of the reference
    mel: Array = field(default_factory=lambda: NO_MEL)  # FP32 [frames, 80], log-mel of the reference
    transcript: str = ""  # what is said in it

    @classmethod
    def from_feed(cls, feed: Feed) -> Self:
        """Read the tensors that `voice_encoder` gives; InputError when they contradict one another."""
        if names.SPEAKER_EMBEDDING not in feed:
            raise InputError(
                f"The request has no voice: give {names.VOICE_NAME}, or the tensors of voice_encoder."
            )
        given = [name in feed for name in (names.PROMPT_TOKENS, names.PROMPT_TOKEN_COUNT, names.PROMPT_MEL)]
        if not any(given):
            return cls(feed[names.SPEAKER_EMBEDDING])
        if not all(given) or names.PROMPT_FRAME_COUNT not in feed:
            raise InputError("The voice is incomplete: send all tensors that voice_encoder gives.")
        return cls(
            feed[names.SPEAKER_EMBEDDING],
            _valid(feed, names.PROMPT_TOKENS, names.PROMPT_TOKEN_COUNT),
            _valid(feed, names.PROMPT_MEL, names.PROMPT_FRAME_COUNT),
        )

    @property
    def has_reference(self) -> bool:
        """Whether there is a recording to continue, and not the speaker embedding alone."""
        return len(self.tokens) > 0

    def checked(self, family: Family) -> Self:
        """Return the voice as `family` hears it; InputError when it holds what no encoder gives.

        Of v2 and v3, tokens without all their mel frames, and frames without tokens, are dropped (official:
        `frontend_zero_shot`).
        """
        tokens, mel = self.tokens, self.mel
        if self.speaker.shape != (SPEAKER_SIZE,) or mel.ndim != 2 or mel.shape[1] != MEL_BINS:
            raise InputError(f"The voice has a shape that {family.title} does not know; encode it again.")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < family.speech_codes:
            raise InputError(
                f"{names.PROMPT_TOKENS} holds the ids {tokens.min()} to {tokens.max()}; allowed are 0 to "
                f"{family.speech_codes - 1}. Take what voice_encoder gives."
            )
        for name, array in ((names.PROMPT_MEL, mel), (names.SPEAKER_EMBEDDING, self.speaker)):
            if not np.isfinite(array).all():
                raise InputError(f"{name} holds NaN or infinite values. Take what voice_encoder gives.")
        if not self.speaker.any():
            raise InputError(f"{names.SPEAKER_EMBEDDING} is all zeros. Take what voice_encoder gives.")
        longest = pipeline_of(family).prompt_tokens.max
        if len(tokens) > longest or len(mel) > pipeline_of(family).prompt_frames.max:
            raise InputError(f"The voice has {len(tokens)} tokens; at most {longest} are allowed.")
        if not family.fade_frames and len(tokens):
            count = max(1, min(len(tokens), len(mel) // family.frames(1)))
            tokens, mel = tokens[:count], mel[: family.frames(count)]
        return type(self)(self.speaker, tokens, mel, self.transcript)

    def feed(self, family: Family, reference: bool, gathered: bool = True) -> Feed:
        """Make the tensors of the flow and the language model; without `reference` all counts are 0."""
        tokens, mel = (self.tokens, self.mel) if reference else (NO_TOKENS, NO_MEL)
        pipeline = pipeline_of(family)
        extent = pipeline.prompt_tokens.padded(len(tokens), gathered)
        frames = pipeline.prompt_frames.padded(len(mel), gathered)
        if pipeline.prompt_frames.base is not None:
            frames = extent * pipeline.prompt_frames.factor
        return {
            names.PROMPT_TOKENS: np.pad(tokens, (0, extent - len(tokens))),
            names.PROMPT_TOKEN_COUNT: np.array([len(tokens)], np.int32),
            names.PROMPT_MEL: np.pad(mel, ((0, frames - len(mel)), (0, 0))),
            names.PROMPT_FRAME_COUNT: np.array([len(mel)], np.int32),
            names.SPEAKER_EMBEDDING: self.speaker,
        }


def _valid(feed: Feed, name: str, count_name: str) -> Array:
    """The entries of a padded tensor that its count names."""
    extent, count = len(feed[name]), int(feed[count_name][0])
    if not 1 <= count <= extent:
        raise InputError(f"{count_name} is {count}; its tensor has room for 1 to {extent}.")
    return feed[name][:count]
