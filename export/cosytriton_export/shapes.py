"""The shape of every weight of a CosyVoice 2 checkpoint under its official key, from the configuration.

This is the file format, said independently of the modules that compute with it; the checkpoint writer fills
it with numbers. The arithmetic behind the shapes: CosyVoice 2, arXiv 2412.10117.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from cosytriton_export.weights import WEIGHT_NORM_SUFFIXES

Shapes = dict[str, tuple[int, ...]]

UP_ENCODER_BLOCKS = 4  # of the flow's encoder behind the upsampling; the official code fixes it
SPECIAL_SPEECH_ROWS = 3  # stop ids behind the speech codes
CONTEXT_EMBEDDINGS = 2  # start of sequence, start of speech
FLOW_LOOKAHEAD_KERNEL = 4
F0_LAYERS = 5


def llm_shapes(config: Mapping[str, Any], qwen: Mapping[str, Any]) -> Shapes:
    """Weights of llm.pt: Qwen2 under `llm.model`, speech embedding and output layer around it."""
    width, inner = qwen["hidden_size"], qwen["intermediate_size"]
    head = width // qwen["num_attention_heads"]
    key_width = qwen["num_key_value_heads"] * head
    rows = config["llm"]["speech_token_size"] + SPECIAL_SPEECH_ROWS
    shapes: Shapes = {
        "llm_embedding.weight": (CONTEXT_EMBEDDINGS, width),
        "llm.model.model.embed_tokens.weight": (qwen["vocab_size"], width),
    }
    for i in range(qwen["num_hidden_layers"]):
        layer = f"llm.model.model.layers.{i}"
        shapes |= _linear(f"{layer}.self_attn.q_proj", width, width)
        shapes |= _linear(f"{layer}.self_attn.k_proj", key_width, width)
        shapes |= _linear(f"{layer}.self_attn.v_proj", key_width, width)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (width, width),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
    shapes |= {
        "llm.model.model.norm.weight": (width,),
        "llm.model.lm_head.weight": (qwen["vocab_size"], width),
        "speech_embedding.weight": (rows, width),
    }
    return shapes | _linear("llm_decoder", rows, width)


def flow_shapes(config: Mapping[str, Any]) -> Shapes:
    """Weights of flow.pt: token embedding, speaker projection, upsampling encoder and U-Net."""
    flow = config["flow"]
    encoder, bins = flow["encoder"], flow["output_size"]
    return (
        {"input_embedding.weight": (flow["vocab_size"], flow["input_size"])}
        | _linear("spk_embed_affine_layer", bins, flow["spk_embed_dim"])
        | _encoder(encoder, "encoder")
        | _linear("encoder_proj", bins, encoder["output_size"])
        | _estimator(flow["decoder"]["estimator"], "decoder.estimator")
    )


def hift_shapes(config: Mapping[str, Any]) -> Shapes:
    """Weights of hift.pt: source, f0 predictor and generator; most convolutions under weight norm."""
    hift = config["hift"]
    rates, width = hift["upsample_rates"], hift["base_channels"]
    spectrum = hift["istft_params"]["n_fft"] + 2  # real and imaginary parts
    shapes = _linear("m_source.l_linear", 1, hift["nb_harmonics"] + 1)
    shapes |= _normed("conv_pre", (width, hift["in_channels"], 7))
    for i, kernel in enumerate(hift["upsample_kernel_sizes"]):
        before, after = width >> i, width >> (i + 1)
        shapes |= _normed(f"ups.{i}", (before, after, kernel), transposed=True)
        stride = prod(rates[i + 1 :])
        shapes |= _conv(f"source_downs.{i}", after, spectrum, 2 * stride if stride > 1 else 1)
        shapes |= _resblock(
            f"source_resblocks.{i}",
            after,
            hift["source_resblock_kernel_sizes"][i],
            hift["source_resblock_dilation_sizes"][i],
        )
        for j, size in enumerate(hift["resblock_kernel_sizes"]):
            index = i * len(hift["resblock_kernel_sizes"]) + j
            shapes |= _resblock(f"resblocks.{index}", after, size, hift["resblock_dilation_sizes"][j])
    shapes |= _normed("conv_post", (spectrum, width >> len(rates), 7))
    f0 = hift["f0_predictor"]
    for i in range(F0_LAYERS):
        before = f0["in_channels"] if i == 0 else f0["cond_channels"]
        # Even indices only: an activation stands between two convolutions.
        shapes |= _normed(f"f0_predictor.condnet.{2 * i}", (f0["cond_channels"], before, 3))
    return shapes | _linear("f0_predictor.classifier", f0["num_class"], f0["cond_channels"])


def _linear(name: str, out: int, width: int) -> Shapes:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def _conv(name: str, out: int, width: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (out, width, kernel), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _normed(name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> Shapes:
    """Lay out a convolution under weight norm; a transposed one has its inputs first."""
    scale, direction = WEIGHT_NORM_SUFFIXES[0]
    return {
        f"{name}.bias": (shape[1 if transposed else 0],),
        name + scale: (shape[0], 1, 1),
        name + direction: shape,
    }


def _resblock(name: str, width: int, kernel: int, dilations: list[int]) -> Shapes:
    shapes: Shapes = {}
    for i in range(len(dilations)):
        for half in (1, 2):
            shapes |= _normed(f"{name}.convs{half}.{i}", (width, width, kernel))
            shapes[f"{name}.activations{half}.{i}.alpha"] = (width,)
    return shapes


def _encoder(encoder: Mapping[str, Any], name: str) -> Shapes:
    width = encoder["output_size"]
    shapes: Shapes = {}
    for embed, before in (("embed", encoder["input_size"]), ("up_embed", width)):
        shapes |= _linear(f"{name}.{embed}.out.0", width, before) | _norm(f"{name}.{embed}.out.1", width)
    shapes |= _conv(f"{name}.pre_lookahead_layer.conv1", width, width, FLOW_LOOKAHEAD_KERNEL)
    shapes |= _conv(f"{name}.pre_lookahead_layer.conv2", width, width, 3)
    for stack, blocks in (("encoders", encoder["num_blocks"]), ("up_encoders", UP_ENCODER_BLOCKS)):
        for i in range(blocks):
            shapes |= _encoder_block(encoder, f"{name}.{stack}.{i}")
    return shapes | _conv(f"{name}.up_layer.conv", width, width, 5) | _norm(f"{name}.after_norm", width)


def _encoder_block(encoder: Mapping[str, Any], name: str) -> Shapes:
    width, heads, inner = encoder["output_size"], encoder["attention_heads"], encoder["linear_units"]
    shapes: Shapes = {f"{name}.self_attn.pos_bias_{kind}": (heads, width // heads) for kind in "uv"}
    for projection in ("q", "k", "v", "out"):
        shapes |= _linear(f"{name}.self_attn.linear_{projection}", width, width)
    shapes[f"{name}.self_attn.linear_pos.weight"] = (width, width)
    shapes |= _linear(f"{name}.feed_forward.w_1", inner, width)
    shapes |= _linear(f"{name}.feed_forward.w_2", width, inner)
    return shapes | _norm(f"{name}.norm_ff", width) | _norm(f"{name}.norm_mha", width)


def _estimator(unet: Mapping[str, Any], name: str) -> Shapes:
    (width,), bands = unet["channels"], unet["in_channels"]
    time = 4 * width
    shapes = _linear(f"{name}.time_mlp.linear_1", time, bands) | _linear(
        f"{name}.time_mlp.linear_2", time, time
    )
    stages = {
        "down_blocks.0": bands,
        **{f"mid_blocks.{i}": width for i in range(unet["num_mid_blocks"])},
        "up_blocks.0": 2 * width,  # the input and the skip connection
    }
    for stage, before in stages.items():
        shapes |= _resnet(f"{name}.{stage}.0", width, before, time)
        for i in range(unet["n_blocks"]):
            shapes |= _transformer(unet, f"{name}.{stage}.1.{i}", width)
        if not stage.startswith("mid"):
            shapes |= _conv(f"{name}.{stage}.2", width, width, 3)
    shapes |= _block(f"{name}.final_block", width, width)
    return shapes | _conv(f"{name}.final_proj", unet["out_channels"], width, 1)


def _block(name: str, width: int, before: int) -> Shapes:
    return _conv(f"{name}.block.0", width, before, 3) | _norm(f"{name}.block.2", width)


def _resnet(name: str, width: int, before: int, time: int) -> Shapes:
    return (
        _linear(f"{name}.mlp.1", width, time)
        | _block(f"{name}.block1", width, before)
        | _block(f"{name}.block2", width, width)
        | _conv(f"{name}.res_conv", width, before, 1)
    )


def _transformer(unet: Mapping[str, Any], name: str, width: int) -> Shapes:
    inner = unet["num_heads"] * unet["attention_head_dim"]
    shapes: Shapes = {f"{name}.attn1.to_{kind}.weight": (inner, width) for kind in "qkv"}
    shapes |= _linear(f"{name}.attn1.to_out.0", width, inner)
    shapes |= _linear(f"{name}.ff.net.0.proj", 4 * width, width) | _linear(
        f"{name}.ff.net.2", width, 4 * width
    )
    return shapes | _norm(f"{name}.norm1", width) | _norm(f"{name}.norm3", width)
