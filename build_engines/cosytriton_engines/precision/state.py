"""The state of a stream as 8-bit integers, where only quantized layers read it: a quarter of the memory.

What the layers make of it does not change: the same values are quantized with the same scale, before they are
kept and not after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from cosytriton_engines.precision.surgery import insert
from cosytriton_ensemble.streaming_flow import ATTENTION, OUT

_MOVING = ("Gather", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity")
"""Operators that give their first input in another order, whatever its type."""


def carry_integers(model: ir.Model) -> ir.Model:
    """Quantize what a graph keeps for its next call, in place; what a layer reads in FP32 stays FP32."""
    outputs = {value.name: value for value in model.graph.outputs}
    for state in model.graph.inputs:
        if str(state.name).startswith(ATTENTION):
            _carry(state, outputs[str(state.name).replace(ATTENTION, ATTENTION + OUT)])
    return model


def _carry(state: ir.Value, kept: ir.Value) -> None:
    moved = _followed(state)
    (joining, _), *others = _uses(moved[-1])
    assert not others, state
    joined = joining.outputs[0]
    readers = [use.node for use in joined.uses()]
    if joining.op_type != "Concat" or {node.op_type for node in readers} != {"QuantizeLinear"}:
        return
    quantizer, kind = readers[0], readers[0].outputs[0].dtype
    assert kind is not None
    place = next(i for i, value in enumerate(joining.inputs) if value is not moved[-1])
    new = joining.inputs[place]
    assert new is not None
    small = insert(new, "QuantizeLinear", [new, *quantizer.inputs[1:]], kind)
    joining.replace_input_with(place, small)
    for value in (*moved, joined):
        value.dtype = kind
    for node in readers:
        node.outputs[0].replace_all_uses_with(joined)
        assert isinstance(node.graph, ir.Graph)
        node.graph.remove(node, safe=True)
    _give(small, new, kept)


def _followed(value: ir.Value) -> list[ir.Value]:
    """A value and what becomes of it until something is computed."""
    values = [value]
    while len(uses := _uses(values[-1])) == 1 and uses[0][0].op_type in _MOVING and uses[0][1] == 0:
        values.append(uses[0][0].outputs[0])
    return values


def _uses(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Who reads a value, and as which input; its length may be asked by anybody."""
    return [(use.node, use.idx) for use in value.uses() if use.node.op_type != "Shape"]


def _give(small: ir.Value, new: ir.Value, kept: ir.Value) -> None:
    """Let the graph's output `kept`, which is made of `new`, be made of `small`."""
    value = kept
    replace: Callable[[ir.Value], None]
    while value is not new:
        node, index = value.producer(), value.index()
        assert small.dtype is not None
        assert node is not None
        assert index is not None
        value.dtype = small.dtype
        if node.op_type == "Loop":
            outputs = node.attributes["body"].as_graph().outputs
            place = index + 1  # whether to go on stands before them
            value, replace = outputs[place], partial(outputs.__setitem__, place)
        else:
            assert node.op_type in _MOVING
            source = node.inputs[0]
            assert source is not None
            value, replace = source, partial(node.replace_input_with, 0)
    replace(small)
