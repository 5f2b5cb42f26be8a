"""Key and value caches of fixed capacity: their shape, the write into them, and the mask over them.

Rows of one batch may stand at different positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a model's caches that do not depend on the batch."""

    layers: int
    heads: int
    head_dim: int

    def zeros(self, batch: int, capacity: int) -> list[Tensor]:
        """Make zeros FP32 [batch, heads, capacity, head_dim] per layer; keys and values each need a list."""
        return [torch.zeros(batch, self.heads, capacity, self.head_dim) for _ in range(self.layers)]


def run_layers(
    layers: nn.ModuleList,
    x: Tensor,
    places: object,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run x [batch, new, width] through layers of (x, places, key cache, value cache) -> the same but places.

    Returns the last layer's x and the updated caches of all.
    """
    keys, values = [], []
    for layer, key_cache, value_cache in zip(layers, key_caches, value_caches, strict=True):
        x, key, value = layer(x, places, key_cache, value_cache)
        keys.append(key)
        values.append(value)
    return x, keys, values


def causal_bias(positions: Tensor, capacity: int) -> Tensor:
    """Hide what stands behind each query: its position [batch, rows] -> FP32 [batch, 1, rows, capacity].

    0 where the cached key is visible, else -inf.
    """
    visible = torch.arange(capacity) <= positions[:, None, :, None]
    return torch.where(visible, 0.0, float("-inf"))


def tensor_scatter(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
    """Write update [batch, heads, new, width] into cache [batch, heads, capacity, width].

    Row b begins at `write_indices[b]`, and `write_indices[b] + new` must not exceed the capacity. In the
    graph this is ONNX's TensorScatter, which may work in place.
    """
    if torch.onnx.is_in_onnx_export():
        inputs = (cache, update, write_indices.long())
        return torch.onnx.ops.symbolic(
            "TensorScatter", inputs, {"axis": 2}, dtype=cache.dtype, shape=cache.shape, version=24
        )
    places = write_indices.long()[:, None] + torch.arange(update.shape[2])
    return cache.scatter(2, places[:, None, :, None].expand_as(update), update)
