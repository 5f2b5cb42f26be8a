"""Shapes of hift.pt: source, f0 predictor and generator (HiFTNet, arXiv 2309.09493).

Most convolutions are under weight norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from cosytriton_export.shapes.layers import Shapes, conv, linear, normed_conv

F0_LAYERS = 5
EDGE_KERNEL = 7  # of the first and the last convolution
F0_KERNEL = 3
F0_LOOKAHEAD_3 = 3  # v3: frames that the first convolution of the f0 predictor looks ahead


def hift_shapes_1_2(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Transposed convolutions raise the rate."""
    return _hift(config["hift"], EDGE_KERNEL, F0_KERNEL, transposed=True)


def hift_shapes_3(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Causal: only the first convolutions look ahead, and repetition raises the rate."""
    hift = config["hift"]
    return _hift(hift, hift["conv_pre_look_right"] + 1, F0_LOOKAHEAD_3 + 1, transposed=False)


def _hift(hift: Mapping[str, Any], first_kernel: int, f0_first_kernel: int, *, transposed: bool) -> Shapes:
    rates, width = hift["upsample_rates"], hift["base_channels"]
    spectrum = hift["istft_params"]["n_fft"] + 2  # real and imaginary parts
    shapes = linear("m_source.l_linear", 1, hift["nb_harmonics"] + 1)
    shapes |= normed_conv("conv_pre", (width, hift["in_channels"], first_kernel))
    for i, kernel in enumerate(hift["upsample_kernel_sizes"]):
        before, after = width >> i, width >> (i + 1)
        channels = (before, after) if transposed else (after, before)
        shapes |= normed_conv(f"ups.{i}", (*channels, kernel), transposed=transposed)
        stride = prod(rates[i + 1 :])
        shapes |= conv(f"source_downs.{i}", after, spectrum, 2 * stride if stride > 1 else 1)
        shapes |= _resblock(
            f"source_resblocks.{i}",
            after,
            hift["source_resblock_kernel_sizes"][i],
            hift["source_resblock_dilation_sizes"][i],
        )
        for j, size in enumerate(hift["resblock_kernel_sizes"]):
            index = i * len(hift["resblock_kernel_sizes"]) + j
            shapes |= _resblock(f"resblocks.{index}", after, size, hift["resblock_dilation_sizes"][j])
    shapes |= normed_conv("conv_post", (spectrum, width >> len(rates), EDGE_KERNEL))
    return shapes | _f0_predictor(hift["f0_predictor"], "f0_predictor", f0_first_kernel)


def _resblock(name: str, width: int, kernel: int, dilations: list[int]) -> Shapes:
    shapes: Shapes = {}
    for i in range(len(dilations)):
        for half in (1, 2):
            shapes |= normed_conv(f"{name}.convs{half}.{i}", (width, width, kernel))
            shapes[f"{name}.activations{half}.{i}.alpha"] = (width,)
    return shapes


def _f0_predictor(f0: Mapping[str, Any], name: str, first_kernel: int) -> Shapes:
    shapes: Shapes = {}
    for i in range(F0_LAYERS):
        before, kernel = (f0["in_channels"], first_kernel) if i == 0 else (f0["cond_channels"], F0_KERNEL)
        # Even indices only: an activation stands between two convolutions.
        shapes |= normed_conv(f"{name}.condnet.{2 * i}", (f0["cond_channels"], before, kernel))
    return shapes | linear(f"{name}.classifier", f0["num_class"], f0["cond_channels"])
