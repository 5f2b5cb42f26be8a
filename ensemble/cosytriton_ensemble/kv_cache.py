"""The key-value cache of a language model whose rows come and go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cosytriton_ensemble.llm_spec import LanguageModelSpec
from cosytriton_ensemble.sampling import FloatArray

CAPACITY_STEP = 64  # positions by which a cache grows: its rows are copied once in so many steps


class KeyValueCache:
    """Keys and values of every layer, [rows, kv_heads, capacity, head_dim] float32 each.

    The first rows are contiguous, so a prefix of them is a tensor that a graph can update in place.
    """

    def __init__(self, spec: LanguageModelSpec, rows: int) -> None:
        names = [f"{kind}_cache.{layer}" for layer in range(spec.layers) for kind in ("key", "value")]
        self._shape = (rows, spec.kv_heads, spec.head_dim)
        self.capacity = 0  # positions
        self.buffers: Mapping[str, FloatArray] = {name: self._empty(0) for name in names}

    def _empty(self, capacity: int) -> FloatArray:
        rows, heads, width = self._shape
        return np.zeros((rows, heads, capacity, width), np.float32)  # pages of untouched rows stay unmapped

    def fit(self, positions: int, rows: int) -> bool:
        """Make the capacity the grid's next size above `positions`, keep `rows`; whether it changed."""
        capacity = -(-positions // CAPACITY_STEP) * CAPACITY_STEP
        if capacity == self.capacity:
            return False
        kept = min(capacity, self.capacity)
        resized = {name: self._empty(capacity) for name in self.buffers}
        for name, buffer in self.buffers.items():
            resized[name][:rows, :, :kept] = buffer[:rows, :, :kept]
        self.buffers, self.capacity = resized, capacity  # all or nothing: a MemoryError leaves it whole
        return True

    def clear(self, row: int) -> None:
        """Zero a row. Positions behind a row's end are masked, but a masked NaN would still spread."""
        for buffer in self.buffers.values():
            buffer[row] = 0

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of a row over another row, and zero what is behind them."""
        for buffer in self.buffers.values():
            buffer[target, :, :positions] = buffer[source, :, :positions]
            buffer[target, :, positions:] = 0
