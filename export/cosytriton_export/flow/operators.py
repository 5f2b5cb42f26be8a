"""Operators that a graph has in another form than PyTorch's: the one that runtimes are fastest at."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def mish(x: Tensor) -> Tensor:
    """Mish, x * tanh(softplus(x)).

    In a graph out of one sigmoid s: with u = s (2 - s), the tanh is u / (2 - u).
    """
    if not torch.compiler.is_exporting():
        return F.mish(x)
    sigmoid = x.sigmoid()
    part = sigmoid * (2 - sigmoid)
    return x * (part / (2 - part))


class Mish(nn.Module):
    """Mish as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return mish(x)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Mix values [B, K, H * D] by queries [B, T, H * D] and keys, under a bias [B, 1, T or 1, K].

    In a graph this is ONNX's Attention, which transposes nothing and adds the bias while it multiplies.
    """
    if torch.compiler.is_exporting():
        if bias.shape[2] == 1:  # ONNX Runtime wants a row for each query
            bias = bias.expand(-1, -1, query.shape[1], -1)
        mixed: Tensor = torch.ops.onnx.Attention.opset23(
            query, key, value, bias, q_num_heads=heads, kv_num_heads=heads
        )[0]
        return mixed
    query, key, value = (torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    weights = torch.softmax(query * query.shape[-1] ** -0.5 @ key.mT + bias, dim=-1)  # [B, H, T, K]
    return (weights @ value).transpose(1, 2).flatten(2)
