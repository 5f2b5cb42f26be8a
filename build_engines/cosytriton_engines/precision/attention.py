"""ONNX's Attention in the forms that runtimes want.

TensorRT builds no engine with it in the body of a Loop: there it is products and a softmax, which TensorRT
fuses itself. ONNX Runtime copies the mask for every head, also where it hides nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.surgery import constant, insert, load, place, save, substitute, type_of


def decompose_attention(model: ir.Model) -> ir.Model:
    """Replace every Attention over [B, T, H * D] with at most an additive mask, in place."""
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Attention":
            substitute(node.outputs[0], _products(node))
            assert isinstance(node.graph, ir.Graph)
            node.graph.remove(node, safe=True)
    return model


def without_attention(path: Path, folder: Path) -> Path:
    """The graph at `path` if it has no Attention, else one in `folder` that computes the same without."""
    model = load(path)
    if all(node.op_type != "Attention" for node in model.graph.all_nodes()):
        return path
    save(decompose_attention(model), folder / path.name)
    return folder / path.name


def skip_empty_masks(model: ir.Model) -> ir.Model:
    """Compute every Attention without its mask where that is zero throughout, in place.

    The same numbers come out, to the last bit.
    """
    empty: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph.all_nodes()):
        mask = node.inputs[3] if node.op_type == "Attention" and len(node.inputs) > 3 else None
        if mask is None:
            continue
        if mask not in empty:
            empty[mask] = _is_zero(mask)
        branches = {"then_branch": _branch(node, masked=False), "else_branch": _branch(node, masked=True)}
        choice = ir.node("If", [empty[mask]], branches, name=f"{node.name}/If")
        choice.outputs[0].type, choice.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        place(node.outputs[0], choice)
        substitute(node.outputs[0], choice.outputs[0])
        assert isinstance(node.graph, ir.Graph)
        node.graph.remove(node, safe=True)
    return model


def _is_zero(mask: ir.Value) -> ir.Value:
    """Whether an additive mask, which has no positive entries, is zero throughout."""
    graph = mask.graph
    assert isinstance(graph, ir.Graph)
    least = insert(mask, "ReduceMin", [mask], type_of(mask), keepdims=0)
    zero = constant(graph, f"{mask.name}/zero", np.array(0, type_of(mask).numpy()))
    return insert(least, "GreaterOrEqual", [least, zero], ir.DataType.BOOL)


def _branch(node: ir.Node, masked: bool) -> ir.Graph:
    inputs = node.inputs if masked else node.inputs[:3]
    name = f"{node.name}/{'masked' if masked else 'unmasked'}"
    attention, given = ir.node("Attention", inputs, node.attributes, name=name), node.outputs[0]
    output = attention.outputs[0]
    output.name, output.type, output.shape = name, given.type, given.shape
    return ir.Graph([], [output], nodes=[attention], name=name)


def _products(node: ir.Node) -> ir.Value:
    query, key, value, *mask = node.inputs
    heads, width = node.attributes["q_num_heads"].as_int(), _width(query)
    graph, kind = node.graph, type_of(node.outputs[0])
    assert isinstance(graph, ir.Graph)

    def add(operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        made = ir.node(operator, inputs, attributes, name=f"{node.name}/{operator}")
        made.outputs[0].dtype = kind
        graph.insert_before(node, made)
        return made.outputs[0]

    numbers = {"heads": np.array([0, 0, heads, -1]), "width": np.array([0, 0, width])}
    split, join = (constant(graph, f"{node.name}/{name}", array) for name, array in numbers.items())
    scale = node.attributes.get_float("scale", (width // heads) ** -0.5)
    factor = constant(graph, f"{node.name}/scale", np.array(scale, kind.numpy()))
    rows = add("Transpose", add("Reshape", query, split), perm=[0, 2, 1, 3])  # [B, H, T, D]
    columns = add("Transpose", add("Reshape", key, split), perm=[0, 2, 3, 1])  # [B, H, D, K]
    content = add("Transpose", add("Reshape", value, split), perm=[0, 2, 1, 3])  # [B, H, K, D]
    scores = add("MatMul", add("Mul", rows, factor), columns)
    scores = add("Add", scores, *mask) if mask else scores
    mixed = add("MatMul", add("Softmax", scores, axis=-1), content)
    return add("Reshape", add("Transpose", mixed, perm=[0, 2, 1, 3]), join)


def _width(value: ir.Value | None) -> int:
    assert value is not None
    assert value.shape is not None
    width = value.shape[-1]
    assert isinstance(width, int), value
    return width
