"""Writes an untrained checkpoint: the official layout, keys and shapes with random weights.

It exercises everything that a trained checkpoint does (full size included) and its speech is noise, which the
file `UNTRAINED` in the directory says.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE2, Family
from cosytriton_ensemble.pipeline import MEL_BINS, SPEAKER_SIZE
from cosytriton_export.checkpoint import Checkpoint, WeightsName
from cosytriton_export.errors import ExportError
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.layout import LAYOUTS, SPEAKERS, TEXT_MODEL, UNTRAINED
from cosytriton_export.random_weights import random_state
from cosytriton_export.shapes import state_shapes
from cosytriton_export.templates import SIZES, Qwen, Size, Sizes, config_text
from cosytriton_export.tokenizer import build_tokenizer, write_tokenizer_files
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx

Progress = Callable[[str], None]

# Byte pairs and merges of frequent English pieces; "Ġ" is the blank of a byte-level vocabulary.
MERGES = (("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("i", "n"), ("a", "n"), ("an", "d"), ("e", "r"), ("l", "l"))

SPEAKER_NAMES = ("中文女", "英文女")
PROMPT_TEXT = "You are a helpful assistant.<|endofprompt|>Hello, this is a voice."
PROMPT_SECONDS = 2


def write_checkpoint(
    path: Path,
    size: Size = "tiny",
    seed: int = 0,
    progress: Progress = lambda _: None,
    family: Family = COSYVOICE2,
) -> Checkpoint:
    """Write an untrained checkpoint to the new directory `path`; it appears complete or not at all.

    `size` "full" has the official shapes (2 to 5 GB). Equal seeds give equal weights. Raises `ExportError`
    when `path` exists.
    """
    if path.exists():
        raise ExportError(f"{path} exists already. Give a new directory.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder, "checkpoint")
        draft.mkdir()
        _write_files(draft, family, size, seed, progress)
        draft.rename(path)
    return Checkpoint.open(path)


def _write_files(path: Path, family: Family, size: Size, seed: int, progress: Progress) -> None:
    sizes = SIZES[family.name][size]
    (path / UNTRAINED).write_text("Random weights: the sound of this checkpoint is noise.\n")
    config_file = path / family.config_file
    config_file.write_text(config_text(family, sizes), encoding="utf-8")
    checkpoint = Checkpoint(path, family, load_hyperyaml(config_file))
    if LAYOUTS[family.name].has_text_model:
        (path / TEXT_MODEL).mkdir()
        write_tokenizer_files(path / TEXT_MODEL, MERGES, family.name)
        (path / TEXT_MODEL / "config.json").write_text(json.dumps(qwen_config(sizes), indent=2))
    for name in get_args(WeightsName):
        shapes = state_shapes(family, name, checkpoint.config, qwen_config(sizes))
        progress(f"writing {name}.pt ({sum(map(math.prod, shapes.values())) / 1e6:.1f} M weights)")
        torch.save(random_state(shapes, checkpoint.config, seed), path / f"{name}.pt")
    progress("writing the encoders of the reference voice")
    files = checkpoint.layout.onnx_files
    write_campplus_onnx(path / files["campplus"], sizes.campplus, seed)
    write_speech_tokenizer_onnx(path / files["speech_tokenizer"], sizes.speech_tokenizer, seed)
    torch.save(_speakers(checkpoint, seed), path / SPEAKERS)


def qwen_config(sizes: Sizes) -> dict[str, object]:
    """Qwen2's config.json for these sizes; empty in version 1."""
    llm = sizes.llm
    if not isinstance(llm, Qwen):
        return {}
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": llm.width,
        "intermediate_size": llm.inner,
        "max_position_embeddings": 32768,
        "num_attention_heads": llm.heads,
        "num_hidden_layers": llm.layers,
        "num_key_value_heads": llm.key_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": sizes.text_rows,
    }


def _speakers(checkpoint: Checkpoint, seed: int) -> Mapping[str, Mapping[str, Any]]:
    """Two speakers: embeddings alone in version 1, later the second one with its reference recording."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    plain, whole = SPEAKER_NAMES
    speakers: dict[str, dict[str, Any]] = {plain: {"embedding": normal(1, SPEAKER_SIZE)}}
    if not checkpoint.layout.has_text_model:
        return speakers | {whole: {"embedding": normal(1, SPEAKER_SIZE)}}
    family = checkpoint.family
    count = PROMPT_SECONDS * family.token_rate
    embedding, text = normal(1, SPEAKER_SIZE), build_tokenizer(checkpoint).encode(PROMPT_TEXT).ids
    tokens = torch.randint(family.speech_codes, (1, count), generator=generator, dtype=torch.int32)
    mel = normal(1, family.frames(count), MEL_BINS) - 5  # the level of soft speech
    return speakers | {
        whole: {
            **_with_length("prompt_text", torch.tensor([text], dtype=torch.int32)),
            **_with_length("llm_prompt_speech_token", tokens),
            **_with_length("flow_prompt_speech_token", tokens),
            **_with_length("prompt_speech_feat", mel),
            "llm_embedding": embedding,
            "flow_embedding": embedding,
        }
    }


def _with_length(key: str, value: Tensor) -> dict[str, Tensor]:
    return {key: value, f"{key}_len": torch.tensor([value.shape[1]], dtype=torch.int32)}
