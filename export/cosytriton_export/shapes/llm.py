"""Shapes of llm.pt, the text-speech language model.

CosyVoice: arXiv 2407.05407; CosyVoice 2: 2412.10117; CosyVoice 3: 2505.17589.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosytriton_export.shapes.layers import Shapes, encoder, linear

CONTEXT_EMBEDDINGS = 2  # start of sequence, start of speech
# Rows behind the speech codes: end of speech and two other stop ids; v3 keeps a reserve.
SPECIAL_ROWS_2 = 3
SPECIAL_ROWS_3 = 200


def llm_shapes_1(config: Mapping[str, Any], _: Mapping[str, Any]) -> Shapes:
    """Text encoder and transformer; only the output layer has a row for the end of speech."""
    llm = config["llm"]
    width, codes = llm["llm_input_size"], llm["speech_token_size"]
    return (
        {"text_embedding.weight": (llm["text_token_size"], llm["text_encoder_input_size"])}
        | encoder(llm["text_encoder"], "text_encoder")
        | linear("text_encoder_affine_layer", width, llm["text_encoder"]["output_size"])
        | {"llm_embedding.weight": (CONTEXT_EMBEDDINGS, width)}
        | encoder(llm["llm"], "llm", norms=("norm1", "norm2"))
        | linear("llm_decoder", codes + 1, llm["llm_output_size"])
        | {"speech_embedding.weight": (codes, width)}
        | linear("spk_embed_affine_layer", width, llm["spk_embed_dim"])
    )


def llm_shapes_2(config: Mapping[str, Any], qwen: Mapping[str, Any]) -> Shapes:
    """Qwen2 with context embeddings, speech embedding and an output layer with bias around it."""
    width, rows = qwen["hidden_size"], config["llm"]["speech_token_size"] + SPECIAL_ROWS_2
    return (
        {"llm_embedding.weight": (CONTEXT_EMBEDDINGS, width)}
        | _qwen2(qwen)
        | linear("llm_decoder", rows, width)
        | {"speech_embedding.weight": (rows, width)}
    )


def llm_shapes_3(config: Mapping[str, Any], qwen: Mapping[str, Any]) -> Shapes:
    """Qwen2, whose context embeddings are rows of the speech embedding; the output layer has no bias."""
    width, rows = qwen["hidden_size"], config["llm"]["speech_token_size"] + SPECIAL_ROWS_3
    return _qwen2(qwen) | {"llm_decoder.weight": (rows, width), "speech_embedding.weight": (rows, width)}


def _qwen2(qwen: Mapping[str, Any], name: str = "llm.model") -> Shapes:
    width, inner, rows = qwen["hidden_size"], qwen["intermediate_size"], qwen["vocab_size"]
    key_width = qwen["num_key_value_heads"] * (width // qwen["num_attention_heads"])
    shapes: Shapes = {f"{name}.model.embed_tokens.weight": (rows, width)}
    for layer in (f"{name}.model.layers.{i}" for i in range(qwen["num_hidden_layers"])):
        shapes |= linear(f"{layer}.self_attn.q_proj", width, width)
        shapes |= linear(f"{layer}.self_attn.k_proj", key_width, width)
        shapes |= linear(f"{layer}.self_attn.v_proj", key_width, width)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (width, width),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
    return shapes | {f"{name}.model.norm.weight": (width,), f"{name}.lm_head.weight": (rows, width)}
