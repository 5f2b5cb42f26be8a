"""Keys and values of beginnings that many requests share, so that they are computed once.

A speaker's requests all begin with the start mark and the reference's transcript. What is kept is found by
the ids themselves: what has equal ids has equal keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cosytriton_ensemble.kv_cache import KeyValueCache
from cosytriton_ensemble.sampling import FloatArray


@dataclass(frozen=True, slots=True)
class _Kept:
    positions: list[FloatArray]  # of each buffer [kv_heads, positions, head_dim]
    logits: FloatArray

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(array.nbytes for array in self.positions)


class PrefixCache:
    """Keeps chunks of rows of a cache; those that were not asked for longest give way.

    Args:
        cache: The rows' cache.
        limit: Bytes that are kept at most.

    """

    def __init__(self, cache: KeyValueCache, limit: int) -> None:
        self._cache, self._limit = cache, limit
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.nbytes = 0

    def restore(self, key: bytes, row: int, start: int) -> FloatArray | None:
        """Write what is kept into a row from position `start` on; the logits behind it, None if unknown."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        self._cache.write(row, start, kept.positions)
        return kept.logits.copy()

    def keep(self, key: bytes, row: int, start: int, stop: int, logits: FloatArray) -> None:
        """Keep the positions [start, stop) of a row and the logits behind them."""
        kept = _Kept(self._cache.read(row, start, stop), logits.copy())
        if kept.nbytes > self._limit:
            return
        self._kept[key] = kept
        self.nbytes += kept.nbytes
        while self.nbytes > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self.nbytes -= oldest.nbytes
