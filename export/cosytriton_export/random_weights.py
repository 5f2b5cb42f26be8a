"""Random weights that behave: a checkpoint of them can be heard.

They are scaled so that activations stay of order one, the language model ends by itself after some seconds,
and the waveform is finite, audible and not clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cosytriton_export.hyperyaml import Config
from cosytriton_export.shapes import Shapes
from cosytriton_export.weights import WEIGHT_NORM_SUFFIXES

# Weights are normal with a variance of 1 / fan-in, times these; biases are zero but for these.
GAINS = {
    "decoder.estimator.final_proj.weight": 0.5,
    "decoder.estimator.proj_out.weight": 0.5,
    "m_source.l_linear.weight": 0.3,
    "conv_pre.weight": 0.25,  # a log-mel is about -5
    "f0_predictor.classifier.weight": 15.0,  # Hz: some frames are voiced, some are not
}
RESIDUAL_GAIN = 0.3  # of the vocoder's residual branches: with 1 it amplifies noise, and 8 bits mean nothing
BIASES = {"f0_predictor.classifier.bias": 20.0}  # Hz
EOS_LOGIT = 3.0  # end of speech is likely enough that an utterance ends by itself
OTHER_STOP_LOGIT = -30.0  # the other stop ids are never drawn
COMMON_PART = 0.6  # mean of a hidden state behind the final norm: 0.55 to 0.75, measured at 2 and 24 layers
LOUDNESS_BIAS = 1.0  # log magnitude of the vocoder's spectrum
ROTARY_BASE = 10_000

_SCALE, _DIRECTION = WEIGHT_NORM_SUFFIXES[0]


def random_state(shapes: Shapes, config: Config, seed: int) -> dict[str, Tensor]:
    """Fill the shapes with seeded weights; `lm_head` shares the memory of the text embedding."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if key.endswith("lm_head.weight"):
            state[key] = state["llm.model.model.embed_tokens.weight"]
        elif not key.endswith(_SCALE):
            state[key] = _random(key.replace(_DIRECTION, ".weight"), shape, config, generator)
    for key in shapes:
        if key.endswith(_SCALE):  # the norm of the direction, so that the folded weight is the direction
            v = state[key.replace(_SCALE, _DIRECTION)]
            state[key] = torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
    if "llm_decoder.weight" in state:
        _make_it_end(state, config["llm"]["speech_token_size"])
    if "conv_post.bias" in state:
        state["conv_post.bias"][: len(state["conv_post.bias"]) // 2] = LOUDNESS_BIAS
    return {key: state[key] for key in shapes}


def _make_it_end(state: Mapping[str, Tensor], codes: int) -> None:
    """Make the end of speech likely, by a bias where the output layer has one."""
    if "llm_decoder.bias" in state:
        bias = state["llm_decoder.bias"]
        bias[codes], bias[codes + 1 :] = EOS_LOGIT, OTHER_STOP_LOGIT
        return
    # Version 3, whose first special row is no end but the start. All speech embeddings get a common part that
    # grows with the depth, as what the layers add does; the rows of the stop ids answer to it.
    layers = 1 + max(int(key.split(".")[4]) for key in state if ".layers." in key)
    state["speech_embedding.weight"].add_(math.sqrt(layers))
    rows = state["llm_decoder.weight"]
    answer = 1 / (COMMON_PART * rows.shape[1])
    rows[codes:], rows[codes + 1] = OTHER_STOP_LOGIT * answer, EOS_LOGIT * answer


def _random(key: str, shape: tuple[int, ...], config: Config, generator: torch.Generator) -> Tensor:
    if key.endswith("rotary_embed.inv_freq"):  # a buffer: the file holds its true values
        return ROTARY_BASE ** -(torch.arange(shape[0]) / shape[0])
    if key.endswith(".bias"):
        return torch.full(shape, BIASES.get(key, 0.0))
    if len(shape) == 1:  # the gain of a norm, or Snake's frequency
        return torch.ones(shape)
    gain = RESIDUAL_GAIN if ".convs2." in key else GAINS.get(key, 1.0)
    return torch.randn(shape, generator=generator).mul_(gain / math.sqrt(_fan_in(key, shape, config)))


def _fan_in(key: str, shape: tuple[int, ...], config: Config) -> float:
    """Count the inputs that one output sums up."""
    if key.endswith(("embedding.weight", "embed_tokens.weight")):
        return 1.0
    # A transposed convolution has its inputs first; an output sees kernel / stride taps of each.
    if key.startswith("ups.") and shape[0] > shape[1]:
        return shape[0] * shape[2] / float(config["hift"]["upsample_rates"][int(key.split(".")[1])])
    if key.endswith("up_blocks.0.2.conv.weight"):
        return shape[0] * shape[2] / 2
    return float(math.prod(shape[1:]))
