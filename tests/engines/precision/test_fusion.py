"""ONNX Runtime's operators for decoders: they compute what the exported graph does, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from cosytriton_engines.precision.fusion import fuse
from cosytriton_engines.precision.probe import value_ranges
from cosytriton_engines.precision.quantize import (
    ONNXRUNTIME,
    observed,
    quantizable,
    quantize,
    quantize_tables,
)
from cosytriton_engines.precision.surgery import load, save
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.llm_spec import Prompt
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Array

TOLERANCE = 1e-4  # of logits up to 30: sums in another order
LENGTHS = (5, 40, 1)  # positions of prompts: rows stand at different places
STEPS = 70  # the capacity of the caches grows on the way
GROUPS = ("GroupQueryAttention", "SkipSimplifiedLayerNormalization")


@pytest.fixture(params=[COSYVOICE2, COSYVOICE3], ids=lambda family: family.name)
def exported(request: pytest.FixtureRequest, repositories: Callable[[Family], Path]) -> Path:
    return version_directory(repositories(request.param), "speech_lm") / FP32_GRAPH


@pytest.fixture
def fused(exported: Path, tmp_path: Path) -> Path:
    save(fuse(load(exported)), tmp_path / FP32_GRAPH)
    return tmp_path / FP32_GRAPH


def prompt(seed: int, positions: int) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(0, 300, positions).astype(np.int32))


def heard(path: Path, rows: list[int]) -> list[Array]:
    """The logits of each of these prompts and of the steps behind it, the rows together: [1 + STEPS, ids]."""
    model = LanguageModel.open(path, threads=1, rows=len(rows))
    logits = [[model.join(prompt(row, LENGTHS[row])).copy()] for row in rows]
    for step in range(STEPS):
        together = model.step([7 * step % 200 + row for row in rows])
        for mine, given in zip(logits, together, strict=True):
            mine.append(given.copy())
    return [np.stack(mine) for mine in logits]


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(path).graph)


def test_computes_what_the_exported_graph_does(exported: Path, fused: Path) -> None:
    rows = list(range(len(LENGTHS)))
    for ours, wanted in zip(heard(fused, rows), heard(exported, rows), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=TOLERANCE)
    found, before = operators(fused), operators(exported)
    assert all(found[group] for group in GROUPS)
    assert not found["RotaryEmbedding"] + found["TensorScatter"] + found["Softmax"]
    assert found.total() < 0.6 * before.total()


@pytest.fixture
def integers(exported: Path, tmp_path: Path) -> Path:
    """In 8 bits, and two layers that read 16."""
    rows, ids = len(LENGTHS), np.stack([prompt(row, max(LENGTHS)).ids for row in range(len(LENGTHS))])
    caches = {value.name: value for value in load(exported).graph.inputs if "_cache." in str(value.name)}
    feed = {"input_ids": ids, "past_counts": np.zeros(rows, np.int32), "new_counts": np.full(rows, 40, "i4")}
    feed |= {str(name): np.zeros((rows, 2, 64, 16), np.float32) for name in caches}
    ranges = value_ranges(exported, [feed], observed)
    model = load(exported)
    quantize(model, ranges, (), ONNXRUNTIME, fine=list(quantizable(model))[2:4])
    save(quantize_tables(fuse(model)), tmp_path / "model.int8.onnx")
    return tmp_path / "model.int8.onnx"


def test_rows_together_have_the_bits_that_each_has_alone(fused: Path, integers: Path) -> None:
    """A rounding error would flip an integer somewhere, and then the token that is drawn."""
    for path in (fused, integers):
        for row, together in enumerate(heard(path, list(range(len(LENGTHS))))):
            np.testing.assert_array_equal(together, heard(path, [row])[0])


def test_a_prompt_may_be_fed_in_pieces(fused: Path) -> None:
    whole, pieces = (LanguageModel.open(fused, threads=1, rows=2) for _ in range(2))
    wanted = whole.join(prompt(0, 90))
    pieces.join(prompt(1, 7))
    pieces.join(Prompt(prompt(0, 90).ids[:33]))
    np.testing.assert_allclose(pieces.extend(1, Prompt(prompt(0, 90).ids[33:])), wanted, atol=TOLERANCE)


def test_what_is_not_found_stays_as_it_is(repositories: Callable[[Family], Path]) -> None:
    """CosyVoice 1 has relative positions, and norms with a mean."""
    path = version_directory(repositories(COSYVOICE1), "speech_lm") / FP32_GRAPH
    before = operators(path)
    assert Counter(node.op_type for node in fuse(load(path)).graph) == before
