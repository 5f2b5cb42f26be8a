"""A decoder with relative positions over key and value caches of fixed capacity (CosyVoice 1's backbone).

Transformer-XL, arXiv 1901.02860: the score of query i and key j adds to their content a term of their
distance, (q_i + v) · W PE(i - j), with sinusoids PE. A causal model has no negative distances, so the term is
computed once for each distance from 0 to the capacity, and each row then picks what its keys stand at: rows
may stand at different positions, and a step costs width * capacity. (Turning Wᵀ(q_i + v) by the angles of i
would need no picking, but heads times as much.) Attributes carry the official key names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from cosytriton_export.flow.encoder import (
    LAYER_NORM_EPS,
    Embedding,
    FeedForward,
    RelativeAttention,
    relative_positions,
)
from cosytriton_export.joined import joined, project
from cosytriton_export.kv_cache import causal_bias, run_layers, tensor_scatter

POSITIONS = 4096
"""The longest sequence of a graph: 80 s of speech, those of the reference among them."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the new positions of each row stand: what all layers share."""

    past_counts: Tensor  # [batch], where in the cache a row's new positions begin
    distances: Tensor  # INT64 [batch, heads, new, capacity], from each query back to each key; ahead of it 0
    bias: Tensor  # [batch, 1, new, capacity], 0 where a key is visible, else -inf

    @classmethod
    def of(cls, heads: int, past_counts: Tensor, new: int, capacity: int) -> Self:
        """Distances and the causal mask."""
        positions = past_counts.long()[:, None] + torch.arange(new)
        distances = (positions[:, None, :, None] - torch.arange(capacity)).clamp(min=0)
        return cls(past_counts, distances.expand(-1, heads, -1, -1), causal_bias(positions, capacity))


class CachedRelativeAttention(RelativeAttention):
    """Causal self-attention with relative positions over a cache of fixed capacity."""

    table: Tensor | None = None  # of `by_distance`, when the weights are final

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.linear_qkv: nn.Linear | None = None

    def join(self) -> None:
        """Project queries, keys and values at once in a graph."""
        self.linear_qkv = joined([self.linear_q, self.linear_k, self.linear_v])

    def tabulate(self) -> None:
        """Keep what the weights make of the distances below `POSITIONS`: a constant of the graph."""
        self.table = None
        self.table = self.by_distance(POSITIONS).detach()

    def by_distance(self, capacity: int) -> Tensor:
        """Project the sinusoids of the distances 0 .. capacity - 1; returns [heads, head width, capacity].

        With a table, those below `POSITIONS` only.
        """
        if self.table is not None:
            return self.table[:, :, :capacity]
        weight = self.linear_pos.weight
        sinusoids = relative_positions(capacity, weight.shape[1], weight.device)[:capacity].flip(0)
        projected: Tensor = self.linear_pos(sinusoids)
        return projected.T.reshape(self.heads, self.head_width, -1)

    def extend(
        self, x: Tensor, places: Places, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from x [batch, new, width]; returns the output and the two updated caches."""
        projected = project(x, (self.linear_q, self.linear_k, self.linear_v), self.linear_qkv)
        heads = projected.reshape(*x.shape[:2], -1, self.head_width).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)  # [batch, heads, new, head width]
        keys = tensor_scatter(key_cache, key, places.past_counts)
        values = tensor_scatter(value_cache, value, places.past_counts)
        content = (query + self.pos_bias_u[:, None]) @ keys.transpose(2, 3)
        by_distance = (query + self.pos_bias_v[:, None]) @ self.by_distance(keys.shape[2])
        scores = (content + by_distance.gather(3, places.distances)) / math.sqrt(self.head_width)
        mixed = (scores + places.bias).softmax(-1) @ values
        return self.linear_out(mixed.transpose(1, 2).flatten(2)), keys, values


class ReluFeedForward(FeedForward):
    """Two linear layers with ReLU between them."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, new, width] -> [batch, new, width]."""
        out: Tensor = self.w_2(F.relu(self.w_1(x)))
        return out


class ReluEmbedding(Embedding):
    """Linear layer, norm and ReLU before a stack of layers."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, new, inputs] -> [batch, new, width], scaled as the sinusoidal positions want it."""
        return F.relu(self.out(x)) * self.scale


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = CachedRelativeAttention(width, heads)
        self.feed_forward = ReluFeedForward(width, hidden)
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(
        self, x: Tensor, places: Places, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [batch, new, width] to the same shape; returns it and the two updated caches."""
        attended, keys, values = self.self_attn.extend(self.norm1(x), places, key_cache, value_cache)
        x = x + attended
        return x + self.feed_forward(self.norm2(x)), keys, values


class RelativeDecoder(nn.Module):
    """The layers between the embeddings and the output."""

    def __init__(self, inputs: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = ReluEmbedding(inputs, width)
        self.encoders = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.after_norm = nn.LayerNorm(width)

    def tabulate(self) -> None:
        """Take the weights for final: what they make of distances becomes a constant."""
        for module in self.modules():
            if isinstance(module, CachedRelativeAttention):
                module.tabulate()

    def forward(
        self, x: Tensor, past_counts: Tensor, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run x [batch, new, inputs] on; returns the state after the final norm and the updated caches."""
        places = Places.of(self.heads, past_counts, x.shape[1], key_caches[0].shape[2])
        x, keys, values = run_layers(self.encoders, self.embed(x), places, key_caches, value_caches)
        return self.after_norm(x), keys, values
