"""Linear layers and layer norms of a checkpoint's ONNX graph, in the forms that exporters give them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from torch import Tensor

from cosytriton_export.onnx_reader import GraphReader, attribute


@dataclass(frozen=True)
class Linear:
    """A product with a constant matrix, and the constant vector that is added at once."""

    node: onnx.NodeProto
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def state(self, key: str) -> dict[str, Tensor]:
        """The weights under the names of `torch.nn.Linear`."""
        bias = {} if self.bias is None else {f"{key}.bias": self.bias}
        return {f"{key}.weight": self.weight, **bias}


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm over the last axis, as one operator or as its arithmetic."""

    last: onnx.NodeProto  # gives the normalised tensor
    weight: Tensor
    bias: Tensor
    epsilon: float

    def state(self, key: str) -> dict[str, Tensor]:
        """The weights under the names of `torch.nn.LayerNorm`."""
        return {f"{key}.weight": self.weight, f"{key}.bias": self.bias}


def linear_layers(reader: GraphReader) -> list[Linear]:
    """All linear layers in execution order: MatMul and perhaps Add, or Gemm.

    Raises:
        ExportError: a Gemm has a computed bias.
    """
    return [linear for node in reader.nodes if (linear := _linear(reader, node))]


def layer_norms(reader: GraphReader) -> list[LayerNorm]:
    """All layer norms in execution order: LayerNormalization, or the arithmetic of older operator sets.

    Raises:
        ExportError: the scale or shift of a LayerNormalization is computed.
    """
    return [norm for node in reader.nodes if (norm := _norm(reader, node))]


def _linear(reader: GraphReader, node: onnx.NodeProto) -> Linear | None:
    if node.op_type not in ("MatMul", "Gemm") or reader.constant(node.input[1]) is None:
        return None
    weight = reader.weight(node, 1)
    if node.op_type == "Gemm":
        bias = reader.weight(node, 2) if len(node.input) > 2 else None
        return Linear(node, weight if attribute(node, "transB", 0) else weight.T, bias)
    return Linear(node, weight.T.contiguous(), _vector(reader, _only(reader, node, "Add")))


def _norm(reader: GraphReader, node: onnx.NodeProto) -> LayerNorm | None:
    if node.op_type == "LayerNormalization":
        weight, bias = reader.weight(node, 1), reader.weight(node, 2)
        return LayerNorm(node, weight, bias, attribute(node, "epsilon", 1e-5))
    return _decomposed_norm(reader, node) if node.op_type == "Sqrt" else None


def _decomposed_norm(reader: GraphReader, root: onnx.NodeProto) -> LayerNorm | None:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, from its square root on."""
    variance = reader.producer(root.input[0])
    division = _only(reader, root, "Div")
    scaled = division and _only(reader, division, "Mul")
    shifted = scaled and _only(reader, scaled, "Add")
    weight, bias = _vector(reader, scaled or None), _vector(reader, shifted or None)
    if variance is None or variance.op_type != "Add" or not shifted or weight is None or bias is None:
        return None
    constants = [reader.constant(name) for name in variance.input]
    epsilon = [float(value) for value in constants if value is not None and value.numel() == 1]
    return LayerNorm(shifted, weight, bias, epsilon[0]) if epsilon else None


def _only(reader: GraphReader, node: onnx.NodeProto, kind: str) -> onnx.NodeProto | None:
    """The single consumer of a node, if it is of that kind."""
    consumers = reader.consumers(node)
    return consumers[0] if len(consumers) == 1 and consumers[0].op_type == kind else None


def _vector(reader: GraphReader, node: onnx.NodeProto | None) -> Tensor | None:
    """The constant vector among a node's inputs."""
    values = [reader.constant(name) for name in node.input] if node else []
    vectors = [value for value in values if value is not None and value.dim() == 1]
    return vectors[0] if vectors else None
