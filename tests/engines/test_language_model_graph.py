"""The language model's graph for TensorRT: the exported one with a cache of fixed length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from cosytriton_engines.gate import GateError
from cosytriton_engines.language_model import CAPACITY, fix_capacity, profile
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.pipeline import SPEECH_LM
from cosytriton_ensemble.repository import version_directory


@pytest.fixture
def exported(tiny_repository: Path) -> Path:
    return version_directory(tiny_repository, SPEECH_LM.name) / DEFAULT_MODEL


def test_only_the_capacity_is_fixed(exported: Path, tmp_path: Path) -> None:
    """The copy computes bit for bit what the exported graph does, and names no open capacity."""
    capacity, batch, new = 64, 2, 5
    fix_capacity(exported, tmp_path / DEFAULT_MODEL, capacity)
    assert b"capacity" not in (tmp_path / DEFAULT_MODEL).read_bytes()
    free, fixed = (ort.InferenceSession(str(p)) for p in (exported, tmp_path / DEFAULT_MODEL))
    sizes = {"batch": batch, "new": new}
    rng = np.random.default_rng(0)
    feed = {}
    for tensor in fixed.get_inputs():
        shape = [sizes.get(dim, dim) for dim in tensor.shape]
        is_cache = tensor.type == "tensor(float)"
        feed[tensor.name] = rng.normal(size=shape).astype("f4") if is_cache else np.full(shape, new, "i4")
        assert not is_cache or shape[2] == capacity
    for ours, theirs in zip(fixed.run(None, feed), free.run(None, feed), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_profile_covers_the_longest_request(exported: Path, tmp_path: Path) -> None:
    fix_capacity(exported, tmp_path / DEFAULT_MODEL)
    shapes = profile(tmp_path / DEFAULT_MODEL)
    # 30 s of reference at 25 tokens a second, 2 x 150 text tokens and two marks; then 60 s of speech.
    prompt = 30 * 25 + 2 * 150 + 2
    assert shapes["input_ids"] == {"min": (1, 1), "opt": (4, 1), "max": (8, prompt)}
    assert shapes["new_counts"] == {"min": (1,), "opt": (4,), "max": (8,)}
    heads, width = shapes["key_cache.0"]["min"][1::2]
    assert shapes["key_cache.0"]["max"] == (8, heads, CAPACITY, width)
    assert prompt + 60 * 25 <= CAPACITY


def test_writing_again_replaces(exported: Path, tmp_path: Path) -> None:
    path = tmp_path / DEFAULT_MODEL
    fix_capacity(exported, path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    fix_capacity(exported, path)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes


def test_profile_refuses_a_cache_of_open_length(exported: Path) -> None:
    with pytest.raises(GateError, match=r"'key_cache.0' is dynamic along \['capacity'\].*fix_capacity"):
        profile(exported)
