"""Shapes of the layers that all modules are built of, under the keys that the official classes give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosytriton_export.weights import WEIGHT_NORM_SUFFIXES

Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, width: int) -> Shapes:
    """A linear layer with bias."""
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def conv(name: str, out: int, width: int, kernel: int) -> Shapes:
    """A 1-d convolution with bias."""
    return {f"{name}.weight": (out, width, kernel), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> Shapes:
    """A layer or group norm with gain and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def normed_conv(name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> Shapes:
    """A convolution under weight norm; a transposed one has its inputs first."""
    scale, direction = WEIGHT_NORM_SUFFIXES[0]
    return {
        f"{name}.bias": (shape[1 if transposed else 0],),
        name + scale: (shape[0], 1, 1),
        name + direction: shape,
    }


def embed(name: str, out: int, width: int) -> Shapes:
    """The input layer of an encoder: linear, then layer norm."""
    return linear(f"{name}.out.0", out, width) | norm(f"{name}.out.1", out)


def encoder(sizes: Mapping[str, Any], name: str, norms: tuple[str, str] = ("norm_ff", "norm_mha")) -> Shapes:
    """An encoder with relative positions: input layer, blocks, final norm.

    `norms` are the names of the two layer norms of a block.
    """
    shapes = embed(f"{name}.embed", sizes["output_size"], sizes["input_size"])
    shapes |= encoder_blocks(sizes, f"{name}.encoders", sizes["num_blocks"], norms)
    return shapes | norm(f"{name}.after_norm", sizes["output_size"])


def encoder_blocks(
    sizes: Mapping[str, Any], name: str, count: int, norms: tuple[str, str] = ("norm_ff", "norm_mha")
) -> Shapes:
    """Blocks of feed-forward and attention with relative positions (Transformer-XL, arXiv 1901.02860)."""
    width, heads, inner = sizes["output_size"], sizes["attention_heads"], sizes["linear_units"]
    shapes: Shapes = {}
    for block in (f"{name}.{i}" for i in range(count)):
        shapes |= {f"{block}.self_attn.pos_bias_{kind}": (heads, width // heads) for kind in "uv"}
        for projection in ("q", "k", "v", "out"):
            shapes |= linear(f"{block}.self_attn.linear_{projection}", width, width)
        shapes[f"{block}.self_attn.linear_pos.weight"] = (width, width)
        shapes |= linear(f"{block}.feed_forward.w_1", inner, width)
        shapes |= linear(f"{block}.feed_forward.w_2", width, inner)
        for kind in norms:
            shapes |= norm(f"{block}.{kind}", width)
    return shapes
