"""The language model's graph for TensorRT: the exported one with a cache of fixed length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from cosytriton_engines.engine.builder import EngineError
from cosytriton_engines.engine.language_model import fix_capacity, profiles, text_encoder_profile
from cosytriton_engines.precision.half import half_names, to_half
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import text_encoder_of
from cosytriton_ensemble.repository import version_directory

PIPELINE = pipeline_of(COSYVOICE2)
CAPACITY = PIPELINE.longest_sequence


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture
def exported(repositories: Callable[[Family], Path], family: Family) -> Path:
    return version_directory(repositories(family), PIPELINE.speech_lm.name) / DEFAULT_MODEL


def test_only_the_capacity_is_fixed(exported: Path, tmp_path: Path) -> None:
    """The copy computes bit for bit what the exported graph does, and names no open capacity."""
    capacity, batch, new = 64, 2, 5
    fix_capacity(exported, tmp_path / DEFAULT_MODEL, capacity)
    assert b"capacity" not in (tmp_path / DEFAULT_MODEL).read_bytes()
    options = ort.SessionOptions()
    # With known sizes more is folded and fused, in another order of sums.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    free, fixed = (ort.InferenceSession(str(p), options) for p in (exported, tmp_path / DEFAULT_MODEL))
    sizes = {"batch": batch, "new": new}
    rng = np.random.default_rng(0)
    feed = {}
    for tensor in fixed.get_inputs():
        shape = [sizes.get(dim, dim) for dim in tensor.shape]
        is_real = tensor.type == "tensor(float)"
        feed[tensor.name] = rng.normal(size=shape).astype("f4") if is_real else np.full(shape, new, "i4")
        assert "cache" not in tensor.name or shape[2] == capacity
    for ours, theirs in zip(fixed.run(None, feed), free.run(None, feed), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_caches_of_half_precision_are_fixed_too(exported: Path, tmp_path: Path) -> None:
    capacity = 128
    model = ir.load(exported)
    caches = [value.name for value in model.graph.inputs if value.name and "_cache." in value.name]
    to_half(model, half_names(model), caches)
    ir.save(model, tmp_path / "half.onnx")
    fix_capacity(tmp_path / "half.onnx", tmp_path / DEFAULT_MODEL, capacity)
    session = ort.InferenceSession(str(tmp_path / DEFAULT_MODEL))
    found = {t.name: t for t in (*session.get_inputs(), *session.get_outputs()) if "_cache" in t.name}
    assert len(found) == 2 * len(caches)
    assert {(t.type, t.shape[2]) for t in found.values()} == {("tensor(float16)", capacity)}


def test_profiles_cover_a_step_of_all_rows_and_the_longest_prompt(
    exported: Path, tmp_path: Path, family: Family
) -> None:
    pipeline, path = pipeline_of(family), tmp_path / DEFAULT_MODEL
    capacity = pipeline.longest_sequence
    fix_capacity(exported, path, capacity)
    step, prompt = profiles(path, pipeline)
    # 30 s of reference, 2 x 150 text tokens and three marks; then 60 s of speech, in v1 what fits.
    longest = 30 * family.token_rate + 2 * 150 + 3
    usual = 5 * family.token_rate + 40
    assert step["input_ids"] == {"min": (1, 1), "opt": (4, 1), "max": (8, 1)}
    assert prompt["input_ids"] == {"min": (1, 1), "opt": (1, usual), "max": (1, longest)}
    for shapes, rows in ((step, 8), (prompt, 1)):
        assert shapes["new_counts"]["max"] == (rows,)
        assert ("embeddings" in shapes) == (family is COSYVOICE1)
        if family is COSYVOICE1:
            assert shapes["embeddings"]["max"][:2] == shapes["input_ids"]["max"]
        heads, width = shapes["key_cache.0"]["min"][1::2]
        assert shapes["key_cache.0"]["max"] == (rows, heads, capacity, width)
    assert min(longest + 60 * family.token_rate, 4096) <= capacity


@pytest.mark.parametrize("family", [COSYVOICE1], ids=["cosyvoice1"])
def test_the_text_encoder_embeds_the_longest_text_of_one_request(exported: Path) -> None:
    assert text_encoder_profile(exported.with_name(text_encoder_of(exported.name))) == {
        "text_ids": {"min": (1, 1), "opt": (1, 40), "max": (1, 2 * 150)},
        "speaker_embedding": dict.fromkeys(("min", "opt", "max"), (1, 192)),
    }


def test_writing_again_replaces(exported: Path, tmp_path: Path) -> None:
    path = tmp_path / DEFAULT_MODEL
    fix_capacity(exported, path, CAPACITY)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    fix_capacity(exported, path, CAPACITY)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes


def test_profiles_refuse_a_cache_of_open_length(exported: Path) -> None:
    with pytest.raises(EngineError, match=r"'key_cache.0' is dynamic along \['capacity'\].*fix_capacity"):
        profiles(exported, PIPELINE)
