"""A checkpoint's ONNX graph as a structure to read weights from, whatever its initializers are called."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_errors
from torch import Tensor

from cosytriton_export.errors import ExportError

_PASSING = ("Identity", "Cast")  # operators that hand their input on unchanged


class GraphReader:
    """Nodes in execution order, who makes and who takes a tensor, and constants by name."""

    def __init__(self, model: onnx.ModelProto, source: str) -> None:
        """`source` names the file in messages."""
        self.model, self.source = model, source
        self.nodes = list(model.graph.node)
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {name: node for node in self.nodes for name in node.output}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self._consumers[name].append(node)

    def error(self, message: str) -> ExportError:
        """An error that says which file was not understood, and why."""
        return ExportError(
            f"{self.source} is not built as expected: {message} Use the file of the official checkpoint."
        )

    def constant(self, name: str) -> Tensor | None:
        """The value of an initializer or `Constant`, also behind Transpose, Identity or Cast; else None."""
        if name in self._initializers:
            return _tensor(numpy_helper.to_array(self._initializers[name]))
        node = self._producers.get(name)
        if node is None:
            return None
        if node.op_type == "Constant":
            value = attribute(node, "value")
            return None if value is None else _tensor(numpy_helper.to_array(value))
        if node.op_type in (*_PASSING, "Transpose"):
            inner = self.constant(node.input[0])
            transposed = node.op_type == "Transpose" and inner is not None
            return inner.permute(attribute(node, "perm")) if inner is not None and transposed else inner
        return None

    def weight(self, node: onnx.NodeProto, index: int) -> Tensor:
        """The constant input `index` of a node.

        Raises:
            ExportError: that input is computed or missing.
        """
        value = self.constant(node.input[index]) if index < len(node.input) else None
        if value is None:
            raise self.error(f"input {index} of {node.op_type} {node.name!r} is no constant.")
        return value

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that computes a tensor; copies and casts are looked through."""
        node = self._producers.get(name)
        while node is not None and node.op_type in _PASSING:
            node = self._producers.get(node.input[0])
        return node

    def consumers(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that take a node's first output; copies and casts are looked through."""
        found: list[onnx.NodeProto] = []
        for consumer in self._consumers[node.output[0]]:
            found += self.consumers(consumer) if consumer.op_type in _PASSING else [consumer]
        return found


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute."""
    for item in node.attribute:
        if item.name == name:
            return onnx.helper.get_attribute_value(item)
    return default


def run_original(model: onnx.ModelProto, source: str, feed: tuple[npt.NDArray[Any], ...]) -> npt.NDArray[Any]:
    """Run the checkpoint's own graph on ONNX Runtime: inputs in order -> the first output.

    Raises:
        ExportError: ONNX Runtime cannot load or run it with these inputs.
    """
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        output = session.run(None, dict(zip(names, feed, strict=True)))[0]
    except (
        ValueError,
        onnxruntime_errors.Fail,
        onnxruntime_errors.InvalidArgument,
        onnxruntime_errors.InvalidGraph,
        onnxruntime_errors.InvalidProtobuf,
        onnxruntime_errors.NotImplemented,
        onnxruntime_errors.RuntimeException,
    ) as error:
        raise ExportError(f"{source} does not run on ONNX Runtime: {error}") from error
    return np.asarray(output)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.copy())
