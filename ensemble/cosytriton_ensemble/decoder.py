"""The language model as its engine sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from cosytriton_ensemble.generation import PromptMaker
from cosytriton_ensemble.llm_spec import LanguageModelSpec, Prompt
from cosytriton_ensemble.sampling import FloatArray


class Decoder(PromptMaker, Protocol):
    """Rows that are decoded together; `LanguageModel` is the real one."""

    spec: LanguageModelSpec
    rows: int
    max_positions: int

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether there is memory for rows of so many positions."""

    def join(self, prompt: Prompt) -> FloatArray:
        """Take the next row for a prompt [n]; logits [speech_rows]. If it raises, no row was taken."""

    def extend(self, row: int, new: Prompt) -> FloatArray:
        """Feed a chunk [n] to one row; logits [speech_rows]. If it raises, the row is as it was."""

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        """Feed one id to every row in use; logits [rows in use, speech_rows], which may be overwritten.

        Nothing is fed to the rows in `waiting`, and their logits mean nothing.
        """

    def leave(self, row: int) -> None:
        """Free a row; the last row in use takes its place."""
