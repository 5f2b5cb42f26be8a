"""Repetition-aware sampling of speech tokens (RAS: VALL-E 2, arXiv 2406.05370; used by CosyVoice 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cosytriton_ensemble.errors import CosytritonError

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.integer[Any]]

Uniform = Callable[[], float]
"""A source of random numbers in [0, 1)."""


class SamplingError(CosytritonError):
    """The logits hold NaN or infinity, so that no token can be drawn."""


def seeded_uniform(seed: int) -> Uniform:
    """Make a request's own random source: equal seeds (any 64-bit integer) give equal numbers."""
    return np.random.Generator(np.random.PCG64(seed % 2**64)).random


@dataclass(frozen=True, slots=True)
class RepetitionAwareSampler:
    """Nucleus sampling that falls back to the whole distribution when it repeats itself.

    A token is drawn from the nucleus: the most probable tokens up to a mass of `top_p`, `top_k` at the
    most. If it stands at least `win_size * tau_r` times among the last `win_size` tokens, it is ruled
    out and another one is drawn from the whole vocabulary.
    """

    top_p: float = 0.8
    top_k: int = 25
    win_size: int = 10
    tau_r: float = 0.1

    def sample(self, logits: FloatArray, history: Sequence[int], uniform: Uniform) -> int:
        """Draw the next token with one number of `uniform`, or two when the first draw is a repetition.

        Args:
            logits: Logits or log-probabilities [vocabulary]; -inf rules a token out.
            history: The tokens emitted so far, oldest first.
            uniform: The random source.

        Raises:
            SamplingError: NaN or +inf among the logits, or nothing left to draw.

        """
        probabilities = _softmax(logits)
        nucleus = self.nucleus(probabilities)
        token = int(nucleus[_draw(probabilities[nucleus], uniform())])
        if history[-self.win_size :].count(token) < self.win_size * self.tau_r:
            return token
        others = logits.copy()
        others[token] = -np.inf
        return _draw(_softmax(others), uniform())

    def nucleus(self, probabilities: FloatArray) -> IdArray:
        """Return the ids of the nucleus [n], most probable first, ties in id order; 1 <= n <= `top_k`."""
        top = min(self.top_k, probabilities.size)
        # Partitioning finds the threshold in linear time; every id that reaches it is then sorted, so
        # that ties across the threshold are broken as a full stable sort would break them.
        threshold = np.partition(probabilities, -top)[-top]
        reached = np.flatnonzero(probabilities >= threshold)
        ids = reached[np.argsort(-probabilities[reached], kind="stable")][:top]
        mass_before = np.cumsum(probabilities[ids]) - probabilities[ids]
        return ids[: max(1, np.count_nonzero(mass_before < self.top_p))]


def _softmax(logits: FloatArray) -> FloatArray:
    peak = logits.max()  # NaN if any logit is
    if not np.isfinite(peak):
        raise SamplingError(
            f"The language model's largest logit is {peak}: no token can be drawn. "
            "Check the precision of the graph and its weights."
        )
    weights: FloatArray = np.exp(logits - peak)
    weights /= weights.sum()
    return weights


def _draw(weights: FloatArray, uniform: float) -> int:
    """Return the first index whose share of the cumulated weight exceeds `uniform` (inverse CDF)."""
    mass = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(mass / mass[-1], uniform, side="right"))
