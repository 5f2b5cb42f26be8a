"""Half precision: a typed FP16 graph from an FP32 one.

TensorRT 11 knows no precision but that of the graph. What learned layers compute becomes FP16, except for
nodes that are named to stay in FP32. What computes from inputs and positions alone stays as well: the floor
of a log-mel is below the smallest half, and angles and masks would lose integers above 2048. Inputs, outputs
and what a loop carries keep their types, so that an ODE solver adds up in FP32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.probe import Range
from cosytriton_engines.precision.surgery import (
    REAL,
    initializers,
    insert,
    is_layer,
    is_lookup,
    is_real,
    place,
    type_of,
)

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_subnormal)
HEADROOM = 8  # louder speech than that of the calibration set must not overflow either
HALF, FULL = ir.DataType.FLOAT16, ir.DataType.FLOAT
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_WITH_BODY = ("Loop", "If", "Scan")
_UNCHANGED = (*_WITH_BODY, "Resize", "Range", "Shape", "Size")  # want FP32, or give no real numbers


def half_names(model: ir.Model, keep: Collection[str] = ()) -> set[str]:
    """The nodes that become half, by name: all that may, but for those in `keep`.

    A cache is half throughout, or its update could not be written where it lies.
    """
    return {str(n.name) for n in real_nodes(model) if n.name not in keep or n.op_type == "TensorScatter"}


def to_half(model: ir.Model, names: Collection[str], half_inputs: Collection[str] = ()) -> ir.Model:
    """Make the named nodes half precision in place, and Q/DQ, which stands around such nodes alone.

    FP64 becomes FP32, which is the most that TensorRT has. Inputs in `half_inputs`, and the outputs that
    continue them, are FP16 themselves: the caches of a language model.
    """
    casts = _Casts()
    for value in initializers(model):
        if value.dtype == ir.DataType.DOUBLE:
            _retype(value, FULL)
    for value in model.graph.inputs:
        if value.name in half_inputs:
            value.dtype = HALF
    for node in list(model.graph.all_nodes()):
        _convert(node, HALF if node.name in names or node.op_type in _QDQ else FULL, casts)
    for graph in model.graphs():
        _restore_outputs(graph, half_inputs if graph is model.graph else ())
    return model


def simulate_half(model: ir.Model, names: Collection[str]) -> ir.Model:
    """Round what the named nodes read and give, in place: what `to_half` computes, whoever runs it.

    ONNX Runtime has few half kernels for CPUs. Elsewhere it computes in FP32 and drops the casts between, so
    that a typed graph hides its overflows there.
    """
    rounding = _Rounding()
    for node in list(model.graph.all_nodes()):
        if node.name in names:
            for index, value in enumerate(node.inputs):
                if value is not None and is_real(value):
                    node.replace_input_with(index, rounding.get(value))
            for output in node.outputs:
                if is_real(output):
                    rounding.give(output)
    return model


def real_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes that may be half, in the order in which they compute."""
    signal = _signal(model)
    return [n for n in model.graph.all_nodes() if n in signal and n.op_type not in _UNCHANGED and _fits(n)]


def _fits(node: ir.Node) -> bool:
    """Whether it gives real numbers, and none of its scalars would become zero: the floor of a norm."""
    scalars = (v.const_value.numpy() for v in node.inputs if v is not None and is_real(v) and v.const_value)
    small = any(array.size == 1 and 0 < abs(array.item()) < SMALLEST for array in scalars)
    return is_real(node.outputs[0]) and not small


def overflowing(model: ir.Model, ranges: Mapping[str, Range]) -> list[str]:
    """The nodes that read or give what half precision cannot hold, by the ranges of what `real_nodes` give.

    An infinite limit is no overflow: FP32 masks with it.
    """

    def overflows(value: ir.Value | None) -> bool:
        limits = ranges.get(str(value.name), (0.0, 0.0)) if value is not None else ()
        return any(np.isfinite(limit) and abs(limit) > LARGEST / HEADROOM for limit in limits)

    return [str(n.name) for n in real_nodes(model) if any(overflows(v) for v in (*n.inputs, *n.outputs))]


def with_ancestors(model: ir.Model, names: Collection[str]) -> set[str]:
    """The named nodes and all that computes what they read, within the same graph or body."""
    found: set[str] = set()
    waiting = [node for node in model.graph.all_nodes() if node.name in names]
    while waiting:
        node = waiting.pop()
        if node.name not in found:
            found.add(str(node.name))
            values = (value for value in node.inputs if value is not None and is_real(value))
            waiting += [producer for value in values if (producer := value.producer()) is not None]
    return found


def rounded(value: ir.Value) -> ir.Value:
    """What half precision leaves of a value, as a value of its own type."""
    half, dtype = insert(value, "Cast", [value], HALF, to=HALF), type_of(value)
    return insert(half, "Cast", [half], dtype, to=dtype)


def _signal(model: ir.Model) -> set[ir.Node]:
    """The nodes that may be half: layers, and what computes from what layers and embeddings gave.

    Not the last one of a graph or body, which adds up what a solver carries on.
    """
    found: set[ir.Node] = set()
    learned: set[ir.Value | None] = set()
    for node in model.graph.all_nodes():
        if is_lookup(node) or is_layer(node) or any(value in learned for value in node.inputs):
            learned.update(value for value in node.outputs if is_real(value))
            gives = any(value.is_graph_output() for value in node.outputs)
            if not gives or is_layer(node) or node.op_type == "TensorScatter":  # a cache is only moved
                found.add(node)
        elif node.op_type in _WITH_BODY:
            learned.update(node.outputs)
    return found


class _Rounding:
    """Rounded values, one for each."""

    def __init__(self) -> None:
        self._made: dict[ir.Value, ir.Value] = {}
        self._results: set[ir.Value] = set()

    def get(self, value: ir.Value) -> ir.Value:
        """What half precision leaves of a value; integers that are dequantized stay as they are."""
        producer = value.producer()
        if value in self._results or (producer is not None and producer.op_type == "DequantizeLinear"):
            return value
        if value not in self._made:
            self._made[value] = _copied(value, HALF, type_of(value)) or rounded(value)
        return self._made[value]

    def give(self, value: ir.Value) -> None:
        """Let everybody read what is left of a value."""
        uses, name = list(value.uses()), value.name
        left = rounded(value)
        for use in uses:
            use.node.replace_input_with(use.idx, left)
        if value.is_graph_output():
            assert isinstance(value.graph, ir.Graph)
            value.graph.outputs[value.graph.outputs.index(value)] = left
            value.name, left.name, left.shape = f"{name}.exact", name, value.shape
        self._results.add(left)


def _copied(value: ir.Value, *dtypes: ir.DataType) -> ir.Value | None:
    """A constant that went through these types one after another; None if the value is no constant."""
    if value.const_value is None or value.graph is None or not value.is_initializer():
        return None
    copy = ir.val(
        f"{value.name}.{'.'.join(dtype.name.lower() for dtype in dtypes)}", const_value=value.const_value
    )
    for dtype in dtypes:
        _retype(copy, dtype)
    value.graph.register_initializer(copy)
    return copy


class _Casts:
    """Casts behind the definitions of values, one for each type."""

    def __init__(self) -> None:
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def get(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in another precision."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self._made:
            copy = _copied(value, dtype)
            self._made[value, dtype] = copy or insert(value, "Cast", [value], dtype, to=dtype)
        return self._made[value, dtype]


def _retype(value: ir.Value, dtype: ir.DataType) -> None:
    assert value.const_value is not None
    array = value.const_value.numpy().astype(np.float64)
    limit = LARGEST if dtype == HALF else np.inf
    finite = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    value.const_value = ir.tensor(finite.astype(dtype.numpy()), name=value.name)
    value.dtype = dtype


def _convert(node: ir.Node, dtype: ir.DataType, casts: _Casts) -> None:
    """Give the node its inputs in one precision, and its outputs that type."""
    for index, value in enumerate(node.inputs):
        if value is not None and (is_real(value) or value.dtype == HALF):
            node.replace_input_with(index, casts.get(value, dtype))
    for output in node.outputs:
        if is_real(output):
            output.dtype = dtype
    to = node.attributes.get("to")
    if node.op_type == "Cast" and to is not None and to.as_int() in REAL:
        node.attributes["to"] = ir.AttrInt64("to", dtype)
    fill = node.attributes.get("value")
    if fill is not None and fill.type == ir.AttributeType.TENSOR and fill.as_tensor().dtype in REAL:
        array = fill.as_tensor().numpy().astype(dtype.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))


def _restore_outputs(graph: ir.Graph, half: Iterable[str]) -> None:
    """Cast what leaves the graph to FP32 under its name, unless it is the continuation of a half input."""
    kept = {name.replace("_cache.", "_cache_out.") for name in half}
    for index, value in enumerate(graph.outputs):
        if value.dtype != HALF or value.name in kept:
            continue
        name, value.name = value.name, f"{value.name}.half"
        cast = ir.node("Cast", [value], {"to": FULL})
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, FULL, value.shape
        place(value, cast)
        graph.outputs[index] = cast.outputs[0]
