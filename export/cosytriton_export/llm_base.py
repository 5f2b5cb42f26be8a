"""What the language models of all families share: ids, how speech is drawn, and the step over caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cosytriton_export.errors import CheckpointError
from cosytriton_export.kv_cache import CacheShape

MARKS = 2
"""Rows of the official `llm_embedding`: start of sequence, and the mark between text and speech."""

DEFAULT_MIX_RATIO = (5, 15)  # what the official classes take when the yaml says nothing


@dataclass(frozen=True, slots=True)
class IdSpace:
    """One numbering of everything that can be embedded, so that a prompt is one row of ids.

    `sos_id` and `task_id` are such unified ids. What the model puts out counts from the first speech row:
    speech token s is output s and has the unified id `speech_offset` + s.
    """

    text_rows: int  # text ids that the model knows
    speech_offset: int
    speech_codes: int  # outputs below this are speech
    speech_rows: int  # width of the logits
    sos_id: int  # start of sequence, unified
    task_id: int  # the mark between the text and the speech, unified
    eos_id: int  # output that ends the speech
    fill_id: int | None  # output that asks for more text, where text arrives in pieces
    official_min_length_id: int  # output that the official code rules out below the minimum length

    @classmethod
    def cosyvoice1(cls, text_rows: int, codes: int) -> Self:
        """Speech rows, then the marks; text has an encoder of its own. One output ends the speech."""
        return cls(text_rows, 0, codes, codes + 1, codes, codes + 1, codes, None, codes)

    @classmethod
    def cosyvoice2(cls, text_rows: int, codes: int, rows: int) -> Self:
        """Text rows, then speech rows, then the marks."""
        sos = text_rows + rows
        return cls(text_rows, text_rows, codes, rows, sos, sos + 1, codes, codes + 2, codes)

    @classmethod
    def cosyvoice3(cls, text_rows: int, codes: int, rows: int) -> Self:
        """Text rows, then speech rows with the marks among them.

        The first row behind the codes is the start of sequence here, and still the one that the official
        code rules out below the minimum length, which therefore is without effect.
        """
        sos = text_rows + codes
        return cls(text_rows, text_rows, codes, rows, sos, sos + 2, codes + 1, codes + 3, codes)

    @property
    def stop_ids(self) -> list[int]:
        """Outputs that end the speech."""
        return list(range(self.speech_codes, self.speech_rows))

    def prompt(self, text: Tensor, speech: Tensor) -> Tensor:
        """Join (prompt text and) text and prompt speech ids [batch, n] to a prompt [batch, 2 + sum of n]."""
        mark = text.new_ones(len(text), 1)
        return torch.cat([self.sos_id * mark, text, self.task_id * mark, self.speech_offset + speech], 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How speech tokens are drawn."""

    sampling: Mapping[str, float]  # of repetition-aware sampling: top_p, top_k, win_size, tau_r
    mix_ratio: tuple[int, int]  # text and speech tokens per block, where text arrives in pieces

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the yaml's `llm` part.

        Raises `CheckpointError`: a sampling parameter is missing, or the mix ratio is no pair of positive
        numbers.
        """
        sampling = {name: config["sampling"][name] for name in ("top_p", "top_k", "win_size", "tau_r")}
        ratio = config.get("mix_ratio", DEFAULT_MIX_RATIO)
        match ratio:
            case [int(text), int(speech)] if text > 0 and speech > 0:
                return cls(sampling, (text, speech))
        raise CheckpointError(
            f"the yaml's mix_ratio is {ratio}; expected are two positive numbers, "
            "the text and the speech tokens of a block."
        )


class LanguageModel(nn.Module, ABC):
    """Logits of the next speech token, for a prompt or for one fed-back token alike."""

    BACKBONE: ClassVar[str]
    """Where the decoder's layers stand: (x, past_counts, key_caches, value_caches) -> (x, keys, values)."""

    llm_decoder: nn.Linear

    def __init__(self, ids: IdSpace, decoding: Decoding, cache: CacheShape) -> None:
        super().__init__()
        self.ids, self.decoding, self.cache = ids, decoding, cache

    @abstractmethod
    def embedding_table(self) -> Tensor:
        """Stack the rows of the id space [ids, width]."""

    def empty_caches(self, batch: int, capacity: int) -> list[Tensor]:
        """Make zeros [batch, kv_heads, capacity, head_dim] per layer; keys and values each need a list."""
        return self.cache.zeros(batch, capacity)

    def forward(
        self, x: Tensor, past_counts: Tensor, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Run new positions behind the cached ones.

        `x` are embeddings [batch, new, width], `past_counts` INT32 [batch] the positions that are already
        in the caches, and the caches one FP32 [batch, kv_heads, capacity, head_dim] per layer with
        past_counts + new <= capacity. Returns the state after the final norm [batch, new, hidden], the
        logits [batch, new, speech_rows] and the updated caches.
        """
        backbone = self.get_submodule(self.BACKBONE)
        hidden, keys, values = backbone(x, past_counts, key_caches, value_caches)
        return hidden, self.llm_decoder(hidden), keys, values
