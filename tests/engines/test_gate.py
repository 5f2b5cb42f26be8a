"""The gate: TensorRT for RTX parses a graph and builds a plan without a GPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from cosytriton_engines import gate
from cosytriton_engines.gate import GateError, Shapes, build_gate
from cosytriton_ensemble.pipeline import FLOW
from cosytriton_export.flow import Flow
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import load_hyperyaml
from onnx import TensorProto, helper
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
PROFILE: Shapes = {"x": {"min": (1, 4), "opt": (2, 4), "max": (8, 4)}}


def write_graph(path: Path, op_type: str, inputs: list[str] | None = None) -> Path:
    """A graph of one operator over x [batch, 4]."""
    node = helper.make_node(op_type, inputs or ["x"], ["y"])
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_missing_tensorrt_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MODULE", "tensorrt_that_is_not_there")
    with pytest.raises(GateError, match=r"pip install tensorrt-rtx-cu12=="):
        build_gate(tmp_path / "model.onnx", PROFILE)


@pytest.mark.gate
def test_good_graph_builds(tmp_path: Path) -> None:
    result = build_gate(write_graph(tmp_path / "model.onnx", "Relu"), PROFILE)
    assert result.plan_bytes > 0
    assert result.build_seconds > 0


@pytest.mark.gate
def test_refused_operator_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="Multinomial"):
        build_gate(write_graph(tmp_path / "model.onnx", "Multinomial"), PROFILE)


@pytest.mark.gate
def test_profile_must_name_the_inputs(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"inputs are \['x'\], the profile's are \['z'\]"):
        build_gate(write_graph(tmp_path / "model.onnx", "Relu"), {"z": PROFILE["x"]})


@pytest.mark.gate
def test_flow_builds(tmp_path: Path) -> None:
    """The solver's Loop, its plain attention and the per-row masks pass as one strongly typed graph."""
    config = load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")["flow"]
    state = load_file(GOLDEN / "flow_v2_weights.safetensors")
    export_stage(FLOW, Flow.from_config(config, state, "golden"), tmp_path / "model.onnx")
    assert build_gate(tmp_path / "model.onnx", FLOW.profile()).plan_bytes > 0
