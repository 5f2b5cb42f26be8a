"""The exporter: names come from the declaration, a graph that does not fit it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from cosytriton_ensemble.spec import Dim, Stage, Tensor
from cosytriton_export import graph
from cosytriton_export.errors import ExportError
from cosytriton_export.graph import export_stage

FRAMES = Dim("frames", 2, 6, 20)
STAGE = Stage("smooth", (Tensor("x", "FP32", (FRAMES, 4)),), (Tensor("y", "FP32", (FRAMES, 4)),))


class Smooth(nn.Module):
    """Repeats a linear layer, so that there are weights in a loop."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, inputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        def body(k: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return k + 1, torch.tanh(self.linear(x))

        return (torch.while_loop(lambda k, _: k < 3, body, (torch.tensor(0), x))[1],)  # type: ignore[no-untyped-call]


class Product(nn.Module):
    """Applies a convolution of one frame as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ self.conv.weight.permute(2, 1, 0).flatten(0, 1),)


def dims(value: onnx.ValueInfoProto) -> list[str | int]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_names_axes_and_values(tmp_path: Path) -> None:
    module = Smooth()
    export_stage(STAGE, module, tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    model = onnx.load(tmp_path / "model.onnx")
    assert {v.name: dims(v) for v in (*model.graph.input, *model.graph.output)} == {
        "x": ["batch", "frames", 4],
        "y": ["batch", "frames", 4],
    }
    assert str(Path(__file__).parent) not in str(model)  # no stack traces of the exporting machine
    x = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
    expected = torch.from_numpy(x)
    for _ in range(3):
        expected = torch.tanh(module.linear(expected))
    (y,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x})
    np.testing.assert_allclose(y, expected.detach().numpy(), atol=1e-6)


def test_weights_stand_as_they_are_used(tmp_path: Path) -> None:
    module = Product()
    export_stage(STAGE, module, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert [node.name for node in model.graph.node] == ["conv/MatMul"]
    (weight,) = model.graph.initializer
    assert weight.name == "conv.weight"
    array = onnx.numpy_helper.to_array(weight)
    np.testing.assert_array_equal(array, module.conv.weight[:, :, 0].T.detach())


def test_large_weights_stand_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 10)
    wide = Stage("wide", (Tensor("x", "FP32", (FRAMES, 64)),), (Tensor("y", "FP32", (FRAMES, 64)),))
    export_stage(wide, Smooth(64), tmp_path / "model.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    ort.InferenceSession(tmp_path / "model.onnx").run(None, wide.sample("min"))


def test_graph_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wrong = Stage("smooth", STAGE.inputs, (Tensor("y", "FP32", (FRAMES, 5)),))
    with pytest.raises(ExportError, match=r"'y' as FLOAT .*declared is FLOAT"):
        export_stage(wrong, Smooth(), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="Smooth cannot be exported"):
        export_stage(STAGE, Smooth(3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
