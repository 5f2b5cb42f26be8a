"""Shapes of flow.pt: an encoder of speech tokens and an estimator of the flow's velocity.

v1, v2: a conformer and a U-Net (Matcha-TTS, arXiv 2309.03199); v3: a look-ahead convolution and a DiT
(F5-TTS, arXiv 2410.06885).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosytriton_export.shapes.layers import Shapes, conv, embed, encoder, encoder_blocks, linear, norm

# What the official classes fix.
UP_ENCODER_BLOCKS = 4  # v2: behind the upsampling
STRIDED_KERNELS = (3, 4)  # v1: of the U-Net's convolutions that halve and double the length
TIME_BANDS_3 = 256  # v3: sines and cosines of the time
POSITION_GROUPS, POSITION_KERNEL = 16, 31  # v3: convolutions that tell positions


def flow_shapes_1(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Conformer, length regulator and a U-Net that halves the length once."""
    flow = config["flow"]
    bins, regulator = flow["output_size"], flow["length_regulator"]["channels"]
    shapes = _ends(flow) | encoder(flow["encoder"], "encoder")
    shapes |= linear("encoder_proj", bins, flow["encoder"]["output_size"])
    for i, _ratio in enumerate(flow["length_regulator"]["sampling_ratios"]):
        layer = 3 * i  # convolution, norm, activation
        shapes |= conv(f"length_regulator.model.{layer}", regulator, regulator, 3)
        shapes |= norm(f"length_regulator.model.{layer + 1}", regulator)
    last = 3 * len(flow["length_regulator"]["sampling_ratios"])
    shapes |= conv(f"length_regulator.model.{last}", bins, regulator, 1)
    return shapes | _strided_unet(flow["decoder"]["estimator"], "decoder.estimator")


def flow_shapes_2(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Upsampling conformer with look-ahead, and a causal U-Net of one length."""
    flow = config["flow"]
    sizes, width = flow["encoder"], flow["encoder"]["output_size"]
    return (
        _ends(flow)
        | encoder(sizes, "encoder")
        | _lookahead("encoder.pre_lookahead_layer", width, width, flow["pre_lookahead_len"])
        | conv("encoder.up_layer.conv", width, width, 5)
        | embed("encoder.up_embed", width, width)
        | encoder_blocks(sizes, "encoder.up_encoders", UP_ENCODER_BLOCKS)
        | linear("encoder_proj", flow["output_size"], width)
        | _causal_unet(flow["decoder"]["estimator"], "decoder.estimator")
    )


def flow_shapes_3(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Look-ahead convolution and diffusion transformer."""
    flow = config["flow"]
    ahead = flow["pre_lookahead_layer"]
    return (
        _ends(flow)
        | _lookahead(
            "pre_lookahead_layer", ahead["in_channels"], ahead["channels"], ahead["pre_lookahead_len"]
        )
        | _dit(flow["decoder"]["estimator"], "decoder.estimator")
    )


def _ends(flow: Mapping[str, Any]) -> Shapes:
    """Token embedding and speaker projection, which all families have."""
    tokens = {"input_embedding.weight": (flow["vocab_size"], flow["input_size"])}
    return tokens | linear("spk_embed_affine_layer", flow["output_size"], flow["spk_embed_dim"])


def _lookahead(name: str, width: int, inner: int, lookahead: int) -> Shapes:
    return conv(f"{name}.conv1", inner, width, lookahead + 1) | conv(f"{name}.conv2", width, inner, 3)


def _strided_unet(unet: Mapping[str, Any], name: str) -> Shapes:
    """Two stages down and up, the first of each with a stride; group norms."""
    width, bands = unet["channels"][0], unet["in_channels"]
    halving, doubling = STRIDED_KERNELS
    inputs = {"down_blocks.0": bands, "down_blocks.1": width} | _mid_inputs(unet, width)
    inputs |= {"up_blocks.0": 2 * width, "up_blocks.1": 2 * width}
    shapes = _unet(unet, name, width, inputs, norm_index=1)
    shapes |= conv(f"{name}.down_blocks.0.2.conv", width, width, halving)
    shapes |= conv(f"{name}.up_blocks.0.2.conv", width, width, doubling)
    for stage in ("down_blocks.1", "up_blocks.1"):
        shapes |= conv(f"{name}.{stage}.2", width, width, 3)
    return shapes


def _causal_unet(unet: Mapping[str, Any], name: str) -> Shapes:
    """One stage down and one up, without a stride; layer norms."""
    (width,), bands = unet["channels"], unet["in_channels"]
    inputs = {"down_blocks.0": bands} | _mid_inputs(unet, width) | {"up_blocks.0": 2 * width}
    shapes = _unet(unet, name, width, inputs, norm_index=2)  # behind a transposition
    for stage in ("down_blocks.0", "up_blocks.0"):
        shapes |= conv(f"{name}.{stage}.2", width, width, 3)
    return shapes


def _mid_inputs(unet: Mapping[str, Any], width: int) -> dict[str, int]:
    return {f"mid_blocks.{i}": width for i in range(unet["num_mid_blocks"])}


def _unet(
    unet: Mapping[str, Any], name: str, width: int, inputs: Mapping[str, int], norm_index: int
) -> Shapes:
    """Time embedding, the stages with their input widths, and the output; not what joins the stages."""

    def block(key: str, before: int) -> Shapes:
        return conv(f"{key}.block.0", width, before, 3) | norm(f"{key}.block.{norm_index}", width)

    time = 4 * width
    shapes = linear(f"{name}.time_mlp.linear_1", time, unet["in_channels"])
    shapes |= linear(f"{name}.time_mlp.linear_2", time, time)
    for stage, before in inputs.items():
        shapes |= linear(f"{name}.{stage}.0.mlp.1", width, time)
        shapes |= block(f"{name}.{stage}.0.block1", before) | block(f"{name}.{stage}.0.block2", width)
        shapes |= conv(f"{name}.{stage}.0.res_conv", width, before, 1)
        for i in range(unet["n_blocks"]):
            shapes |= _transformer(unet, f"{name}.{stage}.1.{i}", width)
    shapes |= block(f"{name}.final_block", width)
    return shapes | conv(f"{name}.final_proj", unet["out_channels"], width, 1)


def _transformer(unet: Mapping[str, Any], name: str, width: int) -> Shapes:
    inner = unet["num_heads"] * unet["attention_head_dim"]
    shapes: Shapes = {f"{name}.attn1.to_{kind}.weight": (inner, width) for kind in "qkv"}
    shapes |= linear(f"{name}.attn1.to_out.0", width, inner)
    shapes |= linear(f"{name}.ff.net.0.proj", 4 * width, width)
    shapes |= linear(f"{name}.ff.net.2", width, 4 * width)
    return shapes | norm(f"{name}.norm1", width) | norm(f"{name}.norm3", width)


def _dit(dit: Mapping[str, Any], name: str) -> Shapes:
    width, inner = dit["dim"], dit["heads"] * dit["dim_head"]
    feed_forward = dit["ff_mult"] * width
    bands = 2 * dit["mel_dim"] + dit["mu_dim"] + dit["spk_dim"]  # state, condition, encoder, speaker
    shapes = linear(f"{name}.time_embed.time_mlp.0", width, TIME_BANDS_3)
    shapes |= linear(f"{name}.time_embed.time_mlp.2", width, width)
    shapes |= linear(f"{name}.input_embed.proj", width, bands)
    for i in (1, 2):
        position = f"{name}.input_embed.conv_pos_embed.conv{i}.0"
        shapes |= conv(position, width, width // POSITION_GROUPS, POSITION_KERNEL)
    shapes[f"{name}.rotary_embed.inv_freq"] = (dit["dim_head"] // 2,)
    for block in (f"{name}.transformer_blocks.{i}" for i in range(dit["depth"])):
        shapes |= linear(f"{block}.attn_norm.linear", 6 * width, width)
        for kind in "qkv":
            shapes |= linear(f"{block}.attn.to_{kind}", inner, width)
        shapes |= linear(f"{block}.attn.to_out.0", width, inner)
        shapes |= linear(f"{block}.ff.ff.0.0", feed_forward, width)
        shapes |= linear(f"{block}.ff.ff.2", width, feed_forward)
    shapes |= linear(f"{name}.norm_out.linear", 2 * width, width)
    return shapes | linear(f"{name}.proj_out", dit["out_channels"], width)
