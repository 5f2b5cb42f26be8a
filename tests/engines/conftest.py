"""NVIDIA's libraries for tests without a GPU, and small graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

STUBS = Path(__file__).with_name("stubs")

WriteGraph = Callable[..., Path]


def _stub(name: str) -> Any:
    spec = spec_from_file_location(name, STUBS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda() -> Iterator[Any]:
    """A fake `cuda.bindings.runtime`; whoever took memory or a stream must have given it back."""
    module = _stub("fake_cuda")
    yield module
    assert not module.allocated
    assert not module.streams


@pytest.fixture
def trt(cuda: Any) -> Any:
    """A fake `tensorrt` that computes with ONNX Runtime on the memory of `cuda`."""
    module = _stub("fake_tensorrt")
    module.cuda = cuda
    return module


@pytest.fixture
def write_graph(tmp_path: Path) -> WriteGraph:
    """Write a graph of operators over x [batch, 4, length], one behind the other: y."""

    def write(
        *op_types: str,
        name: str = "model.onnx",
        dims: Sequence[str | int] = ("batch", 4, "length"),
        **attributes: Any,
    ) -> Path:
        values = ["x", *(f"{index}" for index in range(1, len(op_types))), "y"]
        nodes = [
            helper.make_node(op_type, [values[i]], [values[i + 1]], name=f"node_{i}", **attributes)
            for i, op_type in enumerate(op_types)
        ]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        if op_types[-1] == "NonZero":
            outputs[0].type.tensor_type.elem_type = TensorProto.INT64
        graph = helper.make_graph(nodes, "small", inputs, outputs)
        opset = helper.make_opsetid("", 18)
        onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / name)
        return tmp_path / name

    return write
