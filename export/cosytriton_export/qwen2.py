"""The Qwen2 backbone (arXiv 2407.10671) over key and value caches of fixed capacity.

Grouped-query attention with biased projections and rotary positions, SwiGLU, root-mean-square norms
before each block. Attributes carry the official key names. Rows of one batch may stand at different
positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from cosytriton_export.errors import CheckpointError
from cosytriton_export.joined import joined, project
from cosytriton_export.kv_cache import CacheShape, causal_bias, run_layers, tensor_scatter


@dataclass(frozen=True, slots=True)
class Qwen2Config:
    """The sizes of a Qwen2 backbone, named as in its `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Self:
        """Take the sizes from a parsed `config.json`, which holds more than them.

        Raises `CheckpointError`: a size is missing, or the heads do not divide the width.
        """
        missing = [name for name in cls.__slots__ if name not in config]
        if missing:
            raise CheckpointError(f"the Qwen2 config.json lacks {missing}; it has {sorted(config)}.")
        sizes = cls(**{name: config[name] for name in cls.__slots__})
        widths = (sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads)
        if any(width % divisor for width, divisor in pairwise(widths)):
            raise CheckpointError(
                f"the Qwen2 config.json has {widths} as hidden_size, num_attention_heads and "
                "num_key_value_heads: each must be a multiple of the next."
            )
        return sizes

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def cache(self) -> CacheShape:
        """The shape of the caches."""
        return CacheShape(self.num_hidden_layers, self.num_key_value_heads, self.head_dim)


class Attention(nn.Module):
    """Grouped-query attention over a cache of fixed capacity."""

    def __init__(self, sizes: Qwen2Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self.head_dim, self.group = sizes.head_dim, self.heads // self.kv_heads
        self.q_proj = nn.Linear(sizes.hidden_size, self.heads * self.head_dim)
        self.k_proj = nn.Linear(sizes.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(sizes.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(self.heads * self.head_dim, sizes.hidden_size, bias=False)
        self.qkv_proj: nn.Linear | None = None

    def join(self) -> None:
        """Project queries, keys and values at once in a graph."""
        self.qkv_proj = joined([self.q_proj, self.k_proj, self.v_proj])

    def forward(
        self, x: Tensor, places: Places, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from x [batch, new, hidden]; returns the output and the two updated caches."""
        batch, new, _ = x.shape
        projected = project(x, (self.q_proj, self.k_proj, self.v_proj), self.qkv_proj)
        heads = projected.reshape(batch, new, -1, self.head_dim).transpose(1, 2)
        turned, value = heads.split_with_sizes([self.heads + self.kv_heads, self.kv_heads], 1)
        query, key = rotate(turned, places).split_with_sizes([self.heads, self.kv_heads], 1)
        keys = tensor_scatter(key_cache, key, places.past_counts)
        values = tensor_scatter(value_cache, value, places.past_counts)
        # The heads of a group become rows of one product: [batch, kv_heads, group * new, head_dim].
        query = query.reshape(batch, self.kv_heads, self.group * new, self.head_dim) * self.head_dim**-0.5
        scores = query @ keys.transpose(2, 3) + places.bias  # [batch, kv_heads, group * new, capacity]
        mixed = (scores.softmax(-1) @ values).reshape(batch, self.heads, new, self.head_dim)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, new, -1)), keys, values


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Qwen2Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self.gate_up_proj: nn.Linear | None = None

    def join(self) -> None:
        """Compute the gate and what passes it at once in a graph."""
        self.gate_up_proj = joined([self.gate_proj, self.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to the same shape."""
        gate, up = project(x, (self.gate_proj, self.up_proj), self.gate_up_proj).chunk(2, -1)
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, sizes: Qwen2Config) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = MLP(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, x: Tensor, places: Places, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [batch, new, hidden] to the same shape; returns it and the two updated caches."""
        attended, keys, values = self.self_attn(self.input_layernorm(x), places, key_cache, value_cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Backbone(nn.Module):
    """Qwen2 without a head."""

    def __init__(self, sizes: Qwen2Config, text_rows: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(text_rows, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, x: Tensor, past_counts: Tensor, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run x [batch, new, hidden] on; returns the state after the final norm and the updated caches."""
        places = Places.of(self.sizes, past_counts, x.shape[1], key_caches[0].shape[2])
        x, keys, values = run_layers(self.layers, x, places, key_caches, value_caches)
        return self.norm(x), keys, values


@dataclass(frozen=True, slots=True)
class Places:
    """Where the new positions of each row stand: what all layers share."""

    past_counts: Tensor  # [batch], where in the cache a row's new positions begin
    cos: Tensor  # [batch, new, head_dim / 2]
    sin: Tensor
    bias: Tensor  # [batch, 1, group * new, capacity], 0 where a key is visible, else -inf

    @classmethod
    def of(cls, sizes: Qwen2Config, past_counts: Tensor, new: int, capacity: int) -> Self:
        """Angles of the rotary embedding (arXiv 2104.09864, halves rotated) and the causal mask."""
        half = torch.arange(0, sizes.head_dim, 2) / sizes.head_dim
        positions = past_counts[:, None] + torch.arange(new)  # [batch, new]
        angles = positions[:, :, None] * sizes.rope_theta**-half
        group = sizes.num_attention_heads // sizes.num_key_value_heads
        bias = causal_bias(positions.repeat(1, group), capacity)
        return cls(past_counts, angles.cos(), angles.sin(), bias)


def rotate(x: Tensor, places: Places) -> Tensor:
    """Turn x [batch, heads, new, head_dim] by its positions."""
    return torch.onnx.ops.rotary_embedding(x, places.cos, places.sin)
