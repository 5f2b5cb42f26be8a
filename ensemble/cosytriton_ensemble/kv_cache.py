"""The key-value cache of a language model whose rows come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cosytriton_ensemble.llm_spec import LanguageModelSpec
from cosytriton_ensemble.sampling import FloatArray

MIB = 1 << 20
CAPACITY_STEP = 64  # positions by which a cache grows: its rows are copied once in so many steps


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """How much memory keys and values take, or may take, in bytes."""

    rows: int  # of the requests that are spoken: further ones wait
    prefixes: int  # of what is kept of prompts


DEFAULT_MEMORY = CacheMemory(512 * MIB, 32 * MIB)


class KeyValueCache:
    """Keys and values of every layer, [rows, kv_heads, capacity, head_dim] float32 each.

    The first rows are contiguous, so a prefix of them is a tensor that a graph can update in place.
    """

    def __init__(self, spec: LanguageModelSpec, rows: int) -> None:
        names = [f"{kind}_cache.{layer}" for layer in range(spec.layers) for kind in ("key", "value")]
        self._shape = (rows, spec.kv_heads, spec.head_dim)
        self.capacity = 0  # positions
        self.position_bytes = sum(4 * spec.kv_heads * spec.head_dim for _ in names)  # of one row
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

    def read(self, row: int, start: int, stop: int) -> list[FloatArray]:
        """Copy the positions [start, stop) of a row: [kv_heads, positions, head_dim] of each buffer."""
        return [buffer[row, :, start:stop].copy() for buffer in self.buffers.values()]

    def write(self, row: int, start: int, positions: Sequence[FloatArray]) -> None:
        """Put what `read` gave into a row from position `start` on."""
        for buffer, array in zip(self.buffers.values(), positions, strict=True):
            buffer[row, :, start : start + array.shape[1]] = array

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of a row over another row, and zero what is behind them."""
        for buffer in self.buffers.values():
            buffer[target, :, :positions] = buffer[source, :, :positions]
            buffer[target, :, positions:] = 0
