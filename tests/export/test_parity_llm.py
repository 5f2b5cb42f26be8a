"""Parity of the language model's graphs, and that it notices a graph of other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosytriton_export.errors import ExportError
from cosytriton_export.llm_base import Decoding, IdSpace, LanguageModel
from cosytriton_export.llm_graph import TEXT_ENCODER, export_llm
from cosytriton_export.llm_qwen2 import CosyVoice3LM
from cosytriton_export.llm_transformer import TransformerLM
from cosytriton_export.parity import BATCHES, SIZES
from cosytriton_export.parity_llm import measure_llm
from cosytriton_export.qwen2 import Qwen2Config

TOLERANCE = 1e-4


@pytest.fixture
def transformer(golden_lm: Callable[[str], Any]) -> TransformerLM:
    model: TransformerLM = golden_lm("v1").model
    return model


@pytest.fixture
def folder(golden_lm: Callable[[str], Any]) -> Path:
    path: Path = golden_lm("v1").checkpoint.path
    return path


def places(model: LanguageModel, path: Path) -> set[tuple[str, int]]:
    errors = measure_llm(model, path, TOLERANCE)
    assert max(errors.values()) > 0
    return set(errors)


def test_both_graphs_of_a_model_with_a_text_encoder_pass(transformer: TransformerLM, folder: Path) -> None:
    assert places(transformer, folder / "model.onnx") == {(size, rows) for size in SIZES for rows in BATCHES}


def test_a_graph_without_embeddings_passes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, sizes = IdSpace.cosyvoice3(30, 20, 30), Qwen2Config(32, 64, 2, 4, 2, 1e6, 1e-6)
    model = CosyVoice3LM(sizes, ids, Decoding({}, (5, 15))).requires_grad_(False)
    export_llm(model, tmp_path / "model.onnx")
    assert places(model, tmp_path / "model.onnx") == {(size, rows) for size in SIZES for rows in BATCHES}


@pytest.mark.parametrize(
    ("weight", "name"), [("llm_decoder", "model.onnx"), ("text_encoder_affine_layer", TEXT_ENCODER)]
)
def test_a_graph_of_other_weights_is_refused(
    transformer: TransformerLM, folder: Path, weight: str, name: str
) -> None:
    bias = transformer.get_submodule(weight).get_parameter("bias")
    kept = bias.clone()
    bias.add_(0.01)
    try:
        with pytest.raises(ExportError, match=f"{name}: output .* differs from PyTorch"):
            measure_llm(transformer, folder / "model.onnx", TOLERANCE)
    finally:
        bias.copy_(kept)
