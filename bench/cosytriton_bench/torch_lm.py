"""The language model in PyTorch: what the benchmark asks of it, and this project's own module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the usual name)

from cosytriton_ensemble.sampling import RepetitionAwareSampler, seeded_uniform
from cosytriton_ensemble.spec import Array
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.llm import language_model_of


class TorchLM(ABC):
    """A language model behind unified ids.

    Attributes:
        text_rows: the first unified id of speech.
        speech_rows: width of the logits.
        about: what computes.

    """

    text_rows: int
    speech_rows: int
    about: str

    @abstractmethod
    def run(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Feed ids [rows, new] behind a cache; logits [rows, speech rows] of the last id, the new cache."""

    @abstractmethod
    def cache(self, rows: int, positions: int) -> Any:
        """Make a cache of random keys and values, as if `positions` had been fed."""

    def speak(self, prompt: Tensor, tokens: int, seed: int = 0) -> list[int]:
        """Draw `tokens` speech ids behind a prompt [n] of unified ids.

        The sampler is this project's, which takes less than the official one; no id ends the speech.
        """
        sampler, uniform, said = RepetitionAwareSampler(), seeded_uniform(seed), list[int]()
        logits, cache = self.run(prompt[None])
        while True:
            said.append(sampler.sample(logits[0].log_softmax(0).numpy(), said, uniform))
            if len(said) == tokens:
                return said
            logits, cache = self.run(torch.tensor([[self.text_rows + said[-1]]]), cache)

    def sample_prompt(self, positions: int) -> Tensor:
        """Random unified ids [positions]."""
        drawn = np.random.default_rng(0).integers(0, self.text_rows + self.speech_rows, positions)
        return torch.from_numpy(drawn)


@dataclass(frozen=True, slots=True)
class _Caches:
    """Keys and values of each layer [rows, heads, capacity, width], of which the first `count` are there."""

    count: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def fit(self, positions: int) -> _Caches:
        """Make room."""
        missing = positions - self.keys[0].shape[2]
        if missing <= 0:
            return self
        keys, values = ([F.pad(one, (0, 0, 0, missing)) for one in side] for side in (self.keys, self.values))
        return _Caches(self.count, keys, values)


class ExportedLM(TorchLM):
    """The module that the graph is exported from; the official one computes another, unused head too."""

    about = "language model: the module of the export, without Qwen2's own head"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = language_model_of(checkpoint)
        self._table = self._model.embedding_table()
        self.text_rows, self.speech_rows = self._model.ids.text_rows, self._model.ids.speech_rows

    def run(self, ids: Tensor, cache: _Caches | None = None) -> tuple[Tensor, _Caches]:
        """See `TorchLM`."""
        rows, new = ids.shape
        if cache is None:
            cache = _Caches(0, *(self._model.empty_caches(rows, new) for _ in range(2)))
        cache = cache.fit(cache.count + new)
        past = torch.full((rows,), cache.count, dtype=torch.int32)
        x = F.embedding(ids, self._table)
        _, logits, keys, values = self._model(x, past, cache.keys, cache.values)
        return logits[:, -1], _Caches(cache.count + new, keys, values)

    def cache(self, rows: int, positions: int) -> _Caches:
        """See `TorchLM`."""
        sides = (self._model.empty_caches(rows, positions) for _ in range(2))
        return _Caches(positions, *([torch.randn_like(one) for one in side] for side in sides))


def logits_of(model: TorchLM, prompt: Sequence[int], fed: Sequence[int]) -> Array:
    """Logits [1 + fed, speech rows] behind a prompt, and behind each id that is fed after it."""
    first, cache = model.run(torch.tensor([prompt]))
    rows = [first]
    for one in fed:
        logits, cache = model.run(torch.tensor([[one]]), cache)
        rows.append(logits)
    return np.concatenate([row.numpy() for row in rows])
