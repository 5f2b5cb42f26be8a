"""8-bit integers in a graph: explicit Q/DQ from calibrated ranges, and weights alone.

Two forms of Q/DQ come from the same ranges. TensorRT takes signed integers around zero and real biases. ONNX
Runtime is fastest on a CPU with unsigned activations, and runs a convolution in integers only when its bias
is one and its output is quantized too.

A language model takes the same form on a CPU: with calibrated ranges, and sums of integers, a row has the
same bits in every batch. Scales of the batch, and ONNX Runtime's products with blocks of integers, which add
up a single row in another order than several, would let one request change another's numbers. Layers that
need more than 8 bits read 16, as the sum of two products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.probe import Degrade, Range
from cosytriton_engines.precision.surgery import constant, insert, is_lookup, layers, place, substitute
from cosytriton_ensemble.spec import Array

FEWEST_WEIGHTS = 512
BLOCK = 128  # rows of a weight that share a scale; smaller ones read more scales and are slower
INT8, FLOAT = ir.DataType.INT8, ir.DataType.FLOAT
_MICROSOFT = "com.microsoft"
_SMALLEST_SCALE = float(np.finfo(np.float16).smallest_normal)  # TensorRT gets the scales in half precision


@dataclass(frozen=True, slots=True)
class Form:
    """What a runtime wants of Q/DQ.

    Attributes:
        signed: whether activations are signed and symmetric.
        integer_convolutions: whether a convolution needs an integer bias and a quantized output.

    """

    signed: bool
    integer_convolutions: bool


TENSORRT = Form(signed=True, integer_convolutions=False)
ONNXRUNTIME = Form(signed=False, integer_convolutions=True)


def observed(model: ir.Model) -> list[ir.Value]:
    """The values whose ranges the quantization needs: what layers read, and what convolutions give."""
    nodes = quantizable(model).values()
    values = [node.inputs[0] for node in nodes] + [n.outputs[0] for n in nodes if n.op_type == "Conv"]
    return list({value: None for value in values if value is not None})


def quantizable(model: ir.Model) -> dict[str, ir.Node]:
    """The layers that are worth quantizing, by name: in FP32, and not of a few weights."""
    return {
        name: node
        for name, node in layers(model).items()
        if node.outputs[0].dtype == FLOAT and _array(node.inputs[1]).size >= FEWEST_WEIGHTS
    }


def quantize(
    model: ir.Model,
    ranges: Mapping[str, Range],
    keep: Collection[str],
    form: Form,
    fine: Collection[str] = (),
) -> ir.Model:
    """Put Q/DQ around every layer that is not named in `keep`, in place.

    `ranges` are the `value_ranges` of what is `observed`, by name. Products named in `fine` read 16 bits.
    """
    pairs = _Pairs(ranges, form)
    model.opset_imports[""] = max(model.opset_imports[""], 19)  # the first whose Q/DQ takes half precision
    for name, node in quantizable(model).items():
        if name not in keep:
            _quantize_layer(node, pairs)
        if name in fine:
            _add_rest(node)
    return model


def quantize_tables(model: ir.Model) -> ir.Model:
    """Store what is looked up as 8-bit integers, in place.

    Embeddings have a scale for each row; positions, of which a range is sliced, for each channel.
    """
    made: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in list(model.graph.all_nodes()):
        table = node.inputs[0] if is_lookup(node) else None
        if table is None or table.dtype != FLOAT or node.attributes.get_int("axis", 0) != 0:
            continue
        if table not in made:
            made[table] = _small_table(table, _scaled_axes(node))
        integers, scales = made[table]
        found = insert(node.outputs[0], node.op_type, [integers, *node.inputs[1:]], INT8)
        real = insert(found, "Cast", [found], FLOAT, to=FLOAT)
        if node.op_type == "Gather":
            scales = insert(real, "Gather", [scales, *node.inputs[1:]], FLOAT)
        substitute(node.outputs[0], insert(real, "Mul", [real, scales], FLOAT))
    return model


def _scaled_axes(node: ir.Node) -> tuple[int, ...]:
    """The axes of a table along which entries share a scale: all but the rows, or the one that is sliced."""
    if node.op_type == "Gather":
        return tuple(range(1, _array(node.inputs[0]).ndim))
    return tuple(_array(node.inputs[3]).tolist())


def _small_table(table: ir.Value, axes: tuple[int, ...]) -> tuple[ir.Value, ir.Value]:
    """Integers and scales of a table, as constants."""
    array, graph = _array(table), table.graph
    assert isinstance(graph, ir.Graph)
    scale = np.maximum(np.abs(array).max(axes, keepdims=True) / 127, 1e-10).astype(np.float32)
    integers = np.rint(array / scale).astype(np.int8)
    return constant(graph, f"{table.name}.int8", integers), constant(graph, f"{table.name}.scale", scale)


def quantize_weights(model: ir.Model, keep: Collection[str]) -> ir.Model:
    """Make the weights of products 8-bit integers in blocks, but for the layers named in `keep`, in place."""
    model.opset_imports.setdefault(_MICROSOFT, 1)
    for name, node in quantizable(model).items():
        if node.op_type == "MatMul" and name not in keep:
            _weights_in_blocks(node)
    return model


def degraded(ranges: Mapping[str, Range], form: Form) -> Callable[[ir.Node], Degrade]:
    """What Q/DQ leaves of each input of a layer: activations by their range, weights by their channel."""
    pairs = _Pairs(ranges, form)

    def of(node: ir.Node) -> Degrade:
        def degrade(value: ir.Value) -> ir.Value:
            if value is node.inputs[0]:
                return pairs.get(value)
            return pairs.weight(value, node) if value is node.inputs[1] else value

        return degrade

    return of


def degraded_weights(node: ir.Node) -> Degrade:
    """What blocks of integers leave of a product's weight."""

    def degrade(value: ir.Value) -> ir.Value:
        if value is not node.inputs[1]:
            return value
        integers, scale = _blocks(_array(value))
        columns, rows = len(integers), _array(value).shape[0]
        left = ((integers.astype(np.float32) - 128) * scale[..., None]).reshape(columns, -1)[:, :rows].T
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        return constant(graph, f"{value.name}.degraded", np.ascontiguousarray(left))

    return degrade


def channel_axis(node: ir.Node) -> int:
    """The axis of a layer's weight along which its outputs lie."""
    if node.op_type == "Conv":
        return 0
    transposed = node.attributes.get("transB")
    return 0 if transposed is not None and transposed.as_int() else len(_array(node.inputs[1]).shape) - 1


class _Pairs:
    """Q/DQ behind values, one pair for each."""

    def __init__(self, ranges: Mapping[str, Range], form: Form) -> None:
        self._ranges, self.form = ranges, form
        self._made: dict[ir.Value, ir.Value] = {}
        self._results: set[ir.Value] = set()

    def get(self, value: ir.Value) -> ir.Value:
        """An activation after quantization and back."""
        if value in self._results:
            return value
        if value not in self._made:
            self._made[value] = _pair(value, *_scale(self._ranges[str(value.name)], self.form))
            self._results.add(self._made[value])
        return self._made[value]

    def weight(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A weight of 8-bit integers, dequantized before the node that uses it."""
        if value not in self._made:
            axis = channel_axis(node)
            weights = _weights(_array(value), axis, self._smallest_scale(node), self.form.signed)
            zero = self.form.signed or node.op_type != "MatMul"  # whose zeros ONNX Runtime would subtract
            self._made[value] = _dequantized(value, *weights, axis, node, zero)
        return self._made[value]

    def _smallest_scale(self, node: ir.Node) -> float | Array:
        """Of the weight: half precision must hold it, or 32 bits the bias, in units of both scales."""
        if self.form.signed:
            return _SMALLEST_SCALE
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is None or node.inputs[0] is None:
            return 0.0
        activation = _scale_of(self.get(node.inputs[0]))
        smallest: Array = np.abs(_array(bias)) / (activation * 2**30)
        return smallest


def _scale(limits: Range, form: Form) -> tuple[Array, Array]:
    """Scale and zero point of an activation."""
    low, high = limits
    if form.signed:
        scale = np.float16(max(-low, high, 127 * _SMALLEST_SCALE) / 127)
        return np.array(scale, np.float32), np.array(0, np.int8)
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(high - low, 1e-8) / 255
    return np.array(width, np.float32), np.array(round(-low / width), np.uint8)


def _pair(value: ir.Value, scale: Array, zero: Array) -> ir.Value:
    graph = value.graph
    assert isinstance(graph, ir.Graph)
    constants = [constant(graph, f"{value.name}.{what}", a) for what, a in (("scale", scale), ("zero", zero))]
    quantized = insert(value, "QuantizeLinear", [value, *constants], ir.DataType.from_numpy(zero.dtype))
    return insert(quantized, "DequantizeLinear", [quantized, *constants], FLOAT)


def _dequantized(
    value: ir.Value, weights: Array, scale: Array, axis: int, node: ir.Node, zero: bool = True
) -> ir.Value:
    graph = node.graph  # a runtime packs the constants of the graph in which they are used
    assert isinstance(graph, ir.Graph)
    names = {"int8": weights, "scale": scale, "zero": np.zeros(len(scale), weights.dtype)}
    if not zero:
        del names["zero"]
    inputs = [constant(graph, f"{value.name}.{what}", array) for what, array in names.items()]
    dequantize = ir.node("DequantizeLinear", inputs, {"axis": axis})
    dequantize.outputs[0].dtype = FLOAT
    graph.insert_before(node, dequantize)
    return dequantize.outputs[0]


def _quantize_layer(node: ir.Node, pairs: _Pairs) -> None:
    activation, weight, *bias = node.inputs
    assert activation is not None
    assert weight is not None
    inputs = pairs.get(activation), pairs.weight(weight, node)
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    if not pairs.form.integer_convolutions or node.op_type == "MatMul":
        return
    if bias and bias[0] is not None:
        scale = _scale_of(inputs[0]) * _scale_of(inputs[1])
        integers = np.rint(_array(bias[0]) / scale).clip(-(2**31), 2**31 - 1).astype(np.int32)
        node.replace_input_with(2, _dequantized(bias[0], integers, scale, 0, node))
    output = node.outputs[0]
    if node.op_type == "Conv" and not output.is_graph_output():
        uses = list(output.uses())
        for use in uses:
            use.node.replace_input_with(use.idx, pairs.get(output))


def _add_rest(node: ir.Node) -> None:
    """Multiply what 8 bits left of a quantized product's activation too, in 8 bits of its own."""
    read, weight = node.inputs[0], node.inputs[1]
    assert read is not None
    activation, output = _quantized_from(_quantized_from(read)), node.outputs[0]
    rest = insert(read, "Sub", [activation, read], FLOAT)
    rest.name = f"{node.name}.rest"
    scale = (_scale_of(read) / 255).astype(np.float32)
    second = insert(output, "MatMul", [_pair(rest, scale, np.array(128, np.uint8)), weight], FLOAT)
    total = ir.node("Add", [second, second])
    total.outputs[0].type, total.outputs[0].shape = output.type, output.shape
    place(second, total)
    substitute(output, total.outputs[0])
    total.replace_input_with(0, output)


def _quantized_from(value: ir.Value) -> ir.Value:
    """What Q or DQ made a value of."""
    producer = value.producer()
    assert producer is not None
    assert producer.inputs[0] is not None
    return producer.inputs[0]


def _scale_of(dequantized: ir.Value) -> Array:
    producer = dequantized.producer()
    assert producer is not None
    return _array(producer.inputs[1])


def _weights(array: Array, axis: int, smallest: float | Array, halves: bool) -> tuple[Array, Array]:
    """Quantize symmetrically along the axis of the channels; returns int8 weights and a scale for each."""
    others = tuple(i for i in range(array.ndim) if i != axis)
    scale = np.maximum(np.abs(array).max(others) / 127, np.maximum(smallest, 1e-10))
    scale = (scale.astype(np.float16) if halves else scale).astype(np.float32)
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    return np.rint(array / scale.reshape(shape)).clip(-127, 127).astype(np.int8), scale


def _weights_in_blocks(node: ir.Node) -> None:
    """Turn MatMul into ONNX Runtime's MatMulNBits."""
    weight, graph = node.inputs[1], node.graph
    assert weight is not None
    assert isinstance(graph, ir.Graph)
    (rows, columns), parts = _array(weight).shape, _blocks(_array(weight))
    names = (f"{weight.name}.int8", f"{weight.name}.scale")
    constants = [constant(graph, name, array) for name, array in zip(names, parts, strict=True)]
    sizes = {"K": rows, "N": columns, "bits": 8, "block_size": BLOCK, "accuracy_level": 4}  # 4: in integers
    product = ir.node("MatMulNBits", [node.inputs[0], *constants], sizes, domain=_MICROSOFT, name=node.name)
    product.outputs[0].type, product.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    place(node.outputs[0], product)
    substitute(node.outputs[0], product.outputs[0])


def _blocks(weight: Array) -> tuple[Array, Array]:
    """Quantize [K, N] in blocks along K; uint8 [N, blocks, BLOCK] around 128 and scales [N, blocks]."""
    rows, columns = weight.shape
    padded = np.zeros((columns, -(-rows // BLOCK) * BLOCK), np.float32)
    padded[:, :rows] = weight.T
    padded = padded.reshape(columns, -1, BLOCK)
    scale = np.maximum(np.abs(padded).max(-1) / 127, 1e-10)
    return (np.rint(padded / scale[..., None]) + 128).astype(np.uint8), scale


def _array(value: ir.Value | None) -> Array:
    assert value is not None
    assert value.const_value is not None
    array: Array = value.const_value.numpy()
    return array
