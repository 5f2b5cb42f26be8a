"""The language model's graph for TensorRT: the exported one with a cache of fixed length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from cosytriton_engines.gate import GateError
from cosytriton_engines.language_model import fix_capacity, profile
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
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


def test_profile_covers_the_longest_request(exported: Path, tmp_path: Path, family: Family) -> None:
    pipeline, path = pipeline_of(family), tmp_path / DEFAULT_MODEL
    capacity = pipeline.longest_sequence
    fix_capacity(exported, path, capacity)
    shapes = profile(path, pipeline)
    # 30 s of reference, 2 x 150 text tokens and three marks; then 60 s of speech, in v1 what fits.
    prompt = 30 * family.token_rate + 2 * 150 + 3
    assert shapes["input_ids"] == {"min": (1, 1), "opt": (4, 1), "max": (8, prompt)}
    assert shapes["new_counts"] == {"min": (1,), "opt": (4,), "max": (8,)}
    assert ("embeddings" in shapes) == (family is COSYVOICE1)
    if family is COSYVOICE1:
        assert shapes["embeddings"]["max"][:2] == (8, prompt)
    heads, width = shapes["key_cache.0"]["min"][1::2]
    assert shapes["key_cache.0"]["max"] == (8, heads, capacity, width)
    assert min(prompt + 60 * family.token_rate, 4096) <= capacity


def test_writing_again_replaces(exported: Path, tmp_path: Path) -> None:
    path = tmp_path / DEFAULT_MODEL
    fix_capacity(exported, path, CAPACITY)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    fix_capacity(exported, path, CAPACITY)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes


def test_profile_refuses_a_cache_of_open_length(exported: Path) -> None:
    with pytest.raises(GateError, match=r"'key_cache.0' is dynamic along \['capacity'\].*fix_capacity"):
        profile(exported, PIPELINE)
