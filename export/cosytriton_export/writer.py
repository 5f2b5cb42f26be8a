"""Writes an untrained checkpoint: the official layout, keys and shapes with random weights.

It exercises everything that a trained checkpoint does (full size included) and its speech is noise, which the
file `UNTRAINED` in the directory says. Weights are scaled so that activations stay of order one, the language
model ends by itself after some seconds, and the waveform is finite, audible and not clipped.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cosytriton_export.checkpoint import ONNX_FILES, TEXT_MODEL, UNTRAINED, Checkpoint
from cosytriton_export.errors import ExportError
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.shapes import Shapes, flow_shapes, hift_shapes, llm_shapes
from cosytriton_export.template import SIZES, YAML, Size, Sizes
from cosytriton_export.tokenizer import write_tokenizer_files
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx
from cosytriton_export.weights import WEIGHT_NORM_SUFFIXES

Progress = Callable[[str], None]

CONFIG_FILE = "cosyvoice2.yaml"
# Byte pairs and merges of frequent English pieces; "Ġ" is the blank of a byte-level vocabulary.
MERGES = (("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("i", "n"), ("a", "n"), ("an", "d"), ("e", "r"), ("l", "l"))


# Weights are normal with a variance of 1 / fan-in, times these; biases are zero but for these.
GAINS = {
    "decoder.estimator.final_proj.weight": 0.5,
    "m_source.l_linear.weight": 0.3,
    "conv_post.weight": 0.3,
    "f0_predictor.classifier.weight": 15.0,  # Hz: some frames are voiced, some are not
}
BIASES = {"f0_predictor.classifier.bias": 20.0}  # Hz
EOS_BIAS = 3.0  # end of speech is likely enough that an utterance ends by itself
FILL_BIAS = -100.0  # the two other stop ids are never drawn
LOUDNESS_BIAS = -2.5  # log magnitude of the vocoder's spectrum


def write_checkpoint(
    path: Path, size: Size = "tiny", seed: int = 0, progress: Progress = lambda _: None
) -> Checkpoint:
    """Write an untrained checkpoint to the new directory `path`; it appears complete or not at all.

    `size` "full" has the official shapes (3.1 GB). Equal seeds give equal weights. Raises `ExportError` when
    `path` exists.
    """
    if path.exists():
        raise ExportError(f"{path} exists already. Give a new directory.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder, "checkpoint")
        draft.mkdir()
        _write_files(draft, size, seed, progress)
        draft.rename(path)
    return Checkpoint.open(path)


def _write_files(path: Path, size: Size, seed: int, progress: Progress) -> None:
    sizes = SIZES[size]
    (path / UNTRAINED).write_text("Random weights: the sound of this checkpoint is noise.\n")
    (path / CONFIG_FILE).write_text(YAML.format(**vars(sizes)))
    config = load_hyperyaml(path / CONFIG_FILE)
    (path / TEXT_MODEL).mkdir()
    write_tokenizer_files(path / TEXT_MODEL, MERGES)
    qwen = qwen_config(sizes)
    (path / TEXT_MODEL / "config.json").write_text(json.dumps(qwen, indent=2))
    for name, shapes in (
        ("llm", llm_shapes(config, qwen)),
        ("flow", flow_shapes(config)),
        ("hift", hift_shapes(config)),
    ):
        progress(f"writing {name}.pt ({sum(map(math.prod, shapes.values())) / 1e6:.1f} M weights)")
        torch.save(random_state(shapes, config, seed), path / f"{name}.pt")
    progress("writing the encoders of the reference voice")
    write_campplus_onnx(path / ONNX_FILES["campplus"], sizes.campplus, seed)
    write_speech_tokenizer_onnx(path / ONNX_FILES["speech_tokenizer"], sizes.speech_tokenizer, seed)


def qwen_config(sizes: Sizes) -> dict[str, object]:
    """Qwen2's config.json for these sizes."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": sizes.llm_width,
        "intermediate_size": sizes.llm_inner,
        "max_position_embeddings": 32768,
        "num_attention_heads": sizes.llm_heads,
        "num_hidden_layers": sizes.llm_layers,
        "num_key_value_heads": sizes.llm_key_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": sizes.text_rows,
    }


def random_state(shapes: Shapes, config: Config, seed: int) -> dict[str, Tensor]:
    """Fill the shapes with seeded weights; `lm_head` shares the memory of the text embedding."""
    generator = torch.Generator().manual_seed(seed)
    scale, direction = WEIGHT_NORM_SUFFIXES[0]
    state: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if key.endswith("lm_head.weight"):
            state[key] = state["llm.model.model.embed_tokens.weight"]
        elif not key.endswith(scale):
            state[key] = _random(key.replace(direction, ".weight"), shape, config, generator)
    for key in shapes:
        if key.endswith(scale):  # the norm of the direction, so that the folded weight is the direction
            v = state[key.replace(scale, direction)]
            state[key] = torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
    if "llm_decoder.bias" in state:
        codes = config["llm"]["speech_token_size"]
        state["llm_decoder.bias"][codes], state["llm_decoder.bias"][codes + 1 :] = EOS_BIAS, FILL_BIAS
    if "conv_post.bias" in state:
        state["conv_post.bias"][: len(state["conv_post.bias"]) // 2] = LOUDNESS_BIAS
    return {key: state[key] for key in shapes}


def _random(key: str, shape: tuple[int, ...], config: Config, generator: torch.Generator) -> Tensor:
    if key.endswith(".bias"):
        return torch.full(shape, BIASES.get(key, 0.0))
    if len(shape) == 1:  # the gain of a norm, or Snake's frequency
        return torch.ones(shape)
    gain = GAINS.get(key, 1.0) / math.sqrt(_fan_in(key, shape, config))
    return torch.randn(shape, generator=generator).mul_(gain)


def _fan_in(key: str, shape: tuple[int, ...], config: Config) -> float:
    """Count the inputs that one output sums up."""
    if key.endswith(("embedding.weight", "embed_tokens.weight")):
        return 1.0
    if key.startswith("ups."):  # transposed: an output sees kernel / rate taps of every input channel
        rate = config["hift"]["upsample_rates"][int(key.split(".")[1])]
        return shape[0] * shape[2] / float(rate)
    return float(math.prod(shape[1:]))
