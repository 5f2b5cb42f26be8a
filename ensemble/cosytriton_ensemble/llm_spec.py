"""What the graph of a language model says about itself, and the sequence that it starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

TokenIds = npt.NDArray[np.int32]

METADATA_KEY = "cosytriton.llm"
EMBEDDED = -1
"""In place of an id: the position's embedding is given instead."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row starts from; both arrays have one entry for each position."""

    ids: TokenIds  # [n] unified ids; `EMBEDDED` where the embedding is given
    embeddings: FloatArray | None = None  # [n, width], None where no position needs one
    shared: int = 0  # its first positions that other prompts of the speaker begin with too
    key: bytes = b""  # of a chunk of these: all ids up to its end

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.ids)

    def chunks(self, most: int) -> list[Self]:
        """Divide what is fed at a time: `most` positions at most, and what is shared apart from the rest.

        The same prompt is always divided in the same way, so that its numbers do not depend on what is kept.
        """
        bounds = [*range(0, self.shared, most), *range(self.shared, len(self), most), len(self)]
        return [self._chunk(start, stop) for start, stop in pairwise(bounds)]

    def _chunk(self, start: int, stop: int) -> Self:
        embeddings = None if self.embeddings is None else self.embeddings[start:stop]
        key = self.ids[:stop].tobytes() if stop <= self.shared else b""
        return type(self)(self.ids[start:stop], embeddings, key=key)


@dataclass(frozen=True, slots=True)
class LanguageModelSpec:
    """What a graph says about itself in its metadata.

    Speech ids are indices of the logits. Unified ids are those that the graph takes: speech id s is
    `speech_offset` + s, and text id t is t unless a text encoder embeds the text.
    """

    text_rows: int  # text ids are smaller
    text_encoder: bool  # the text is embedded by a graph of its own, beside this one (CosyVoice 1)
    speech_offset: int  # first unified id of speech
    speech_codes: int  # speech ids below this are speech, the others special
    speech_rows: int  # width of the logits
    sos_id: int  # unified
    task_id: int  # unified
    eos_id: int  # speech id: the end of the speech
    fill_id: int | None  # speech id: more text is wanted; None where all text must be there at the start
    official_min_length_id: int  # speech id, the only one that the official code rules out at first
    stop_ids: frozenset[int]  # speech ids that end the speech
    mix_ratio: tuple[int, int]  # text and speech ids of a block, where the text comes while it is spoken
    layers: int
    kv_heads: int
    head_dim: int
    sampler: RepetitionAwareSampler

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the metadata text.

        Raises:
            RepositoryError: It is no JSON or lacks a field.

        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["sampler"] = RepetitionAwareSampler(**fields.pop("sampling"))
            fields["stop_ids"] = frozenset(fields["stop_ids"])
            block_text, block_speech = fields["mix_ratio"]
            return cls(**{**fields, "mix_ratio": (block_text, block_speech)})
        except (KeyError, TypeError, ValueError) as cause:
            raise RepositoryError(
                f"The metadata {METADATA_KEY!r} of the language model does not fit this version ({cause}); "
                f"it is {text!r}. Export the model again."
            ) from cause

    def prompt(self, text: Sequence[int], prompt_speech: Sequence[int], transcript: int = 0) -> Prompt:
        """Lay out what the model starts from: [1 + text + 1 + prompt speech] positions.

        The first `transcript` ids of the text are the reference's own.

        This is the layout of every family: CosyVoice 1 (arXiv 2407.05407), whose text is `EMBEDDED`, and
        CosyVoice 2 (arXiv 2412.10117).
        """
        speech = [self.speech_offset + code for code in prompt_speech]
        ids = np.array([self.sos_id, *text, self.task_id, *speech], np.int32)
        return Prompt(ids, shared=1 + transcript if transcript else 0)
