"""The gate: TensorRT for RTX parses a graph and builds a plan without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from cosytriton_engines import gate, language_model
from cosytriton_engines.gate import GateError, Shapes, build_gate
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.families import COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.repository import artifacts, version_directory

PIPELINE = pipeline_of(COSYVOICE2)
CAPACITY = PIPELINE.longest_sequence
GRAPHS = [model for model, file in artifacts(PIPELINE).items() if file == DEFAULT_MODEL]
PROFILE: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 1), "max": (8, 4, 1)}}


def exported(repository: Path, model: str) -> Path:
    return version_directory(repository, model) / DEFAULT_MODEL


def write_graph(path: Path, op_type: str, **attributes: Any) -> Path:
    """A graph of one operator over x [batch, 4, 1]."""
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"], name="the_node", **attributes)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_missing_tensorrt_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MODULE", "tensorrt_that_is_not_there")
    with pytest.raises(GateError, match=r"pip install tensorrt-rtx-cu12=="):
        build_gate(tmp_path / "model.onnx", PROFILE)


@pytest.mark.gate
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("model", GRAPHS)
def test_every_exported_graph_builds(
    model: str, family: Family, repositories: Callable[[Family], Path], tmp_path: Path
) -> None:
    """Strongly typed, over the whole range of sizes that is served."""
    pipeline, path = pipeline_of(family), exported(repositories(family), model)
    if model == pipeline.speech_lm.name:
        path = tmp_path / DEFAULT_MODEL
        language_model.fix_capacity(exported(repositories(family), model), path, pipeline.longest_sequence)
        profile: Shapes = language_model.profile(path, pipeline)
    else:
        profile = next(stage.profile() for stage in pipeline.native_stages if stage.name == model)
    assert build_gate(path, profile).plan_bytes > 0


@pytest.mark.gate
def test_cache_of_open_length_is_refused(tiny_repository: Path, tmp_path: Path) -> None:
    """Why the language model's graph is not built as it is exported."""
    path = tmp_path / DEFAULT_MODEL
    language_model.fix_capacity(exported(tiny_repository, PIPELINE.speech_lm.name), path, CAPACITY)
    profile = language_model.profile(path, PIPELINE)
    with pytest.raises(GateError, match=r"(?s)TensorScatter .*KV cache tensor must have a static sequence"):
        build_gate(exported(tiny_repository, PIPELINE.speech_lm.name), profile)


@pytest.mark.gate
def test_refused_operator_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="DFT 'the_node': INVALID_NODE, .*Plugin not found"):
        build_gate(write_graph(tmp_path / DEFAULT_MODEL, "DFT", axis=1), PROFILE)


@pytest.mark.gate
def test_profile_must_name_the_inputs(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"inputs are \['x'\], the profile's are \['z'\]"):
        build_gate(write_graph(tmp_path / DEFAULT_MODEL, "Relu"), {"z": PROFILE["x"]})
