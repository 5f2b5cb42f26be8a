"""Snake activations of a quantized graph as tables.

Between two convolutions in integers, x + sin^2(alpha x) / alpha is a function of few values for each channel:
256 of them where x comes out of a convolution, and as many as 8 bits of the result can tell apart where x is
the sum of a residual block. A look-up costs a fifth of the sine, which ONNX Runtime computes on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.surgery import constant, insert, place
from cosytriton_ensemble.spec import Array

FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32
MICROSOFT = "com.microsoft"
ENTRIES = 1024  # for a real x: about four for each step of the result
_INTEGERS = 256
_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class _Snake:
    """x + sin^2(alpha x) * gain, with `alpha` and `gain` FP64 [channels, 1], and its quantization."""

    x: ir.Value
    alpha: Array
    gain: Array
    quantize: ir.Node

    def __call__(self, x: Array) -> Array:
        """FP64 [entries] or [channels, entries] -> [channels, entries]; it never falls."""
        result: Array = x + np.sin(self.alpha * x) ** 2 * self.gain
        return result

    def table(self, x: Array) -> Array:
        """Quantize the values at `x`, FP64 [entries] -> UINT8 [1, channels, entries]."""
        scale, zero = (_array(value) for value in self.quantize.inputs[1:])
        return np.clip(np.rint(self(x) / scale) + zero, 0, _INTEGERS - 1).astype(np.uint8)[None]

    def reach(self) -> tuple[float, float]:
        """The smallest and the largest x beyond which no channel's quantized value changes any more."""
        scale, zero = (float(_array(value)) for value in self.quantize.inputs[1:])
        low, high = -zero * scale, (_INTEGERS - 1 - zero) * scale
        below, above = np.full_like(self.alpha, low) - self.gain, np.full_like(self.alpha, low)
        for _ in range(_BISECTIONS):
            middle = (below + above) / 2
            under = self(middle) < low
            below, above = np.where(under, middle, below), np.where(under, above, middle)
        return float(below.min()), high


def tabulate_snakes(model: ir.Model) -> ir.Model:
    """Replace each Snake whose result is an 8-bit integer by a look-up, in place."""
    if snakes := [snake for node in model.graph if (snake := _snake(node)) is not None]:
        tables = _Tables(model)
        for snake in snakes:
            tables.replace(snake)
    return model


class _Tables:
    """Puts tables into a graph; what they share is computed once."""

    def __init__(self, model: ir.Model) -> None:
        model.opset_imports.setdefault(MICROSOFT, 1)
        self._graph = model.graph
        self._padding: dict[ir.Value, ir.Value] = {}
        rows = ir.node("Shape", [model.graph.inputs[0]], {"start": 0, "end": 1})
        rows.outputs[0].dtype = ir.DataType.INT64
        model.graph.insert_before(model.graph[0], rows)
        ones = constant(model.graph, "snake.ones", np.ones(2, np.int64))
        self._batch = insert(rows.outputs[0], "Concat", [rows.outputs[0], ones], ir.DataType.INT64, axis=0)

    def replace(self, snake: _Snake) -> None:
        """Look the quantized value up instead of computing it."""
        index, x = self._integer(snake) or self._real(snake)
        name = f"{snake.quantize.outputs[0].name}.table"
        table = constant(self._graph, name, snake.table(x))
        tables = insert(self._batch, "Expand", [table, self._batch], ir.DataType.UINT8)
        found = insert(index, "GatherElements", [tables, index], ir.DataType.UINT8, axis=2)
        snake.quantize.outputs[0].replace_all_uses_with(found)

    def _integer(self, snake: _Snake) -> tuple[ir.Value, Array] | None:
        """The index where x is an integer that was dequantized, and perhaps masked: its entries' x."""
        value, mask = snake.x, None
        if (product := _made_by(value, "Mul")) is not None:
            value, mask = (v for v in product.inputs if v is not None)
        dequantize = _made_by(value, "DequantizeLinear")
        if dequantize is None:
            return None
        integer, scale, zero = dequantize.inputs
        assert integer is not None
        x = (np.arange(_INTEGERS) - float(_array(zero))) * float(_array(scale))
        index = insert(integer, "Cast", [integer], INT32, to=INT32)
        if mask is not None:  # a masked x, which is zero, has the entry behind all others
            index, x = insert(snake.x, "Max", [index, self._padded(mask)], INT32), np.append(x, 0)
        return index, x

    def _padded(self, mask: ir.Value) -> ir.Value:
        """The index of what a mask sets to zero, else 0."""
        if mask not in self._padding:
            numbers = {"one": 1, "entry": _INTEGERS}
            one, entry = (
                constant(self._graph, f"{mask.name}.{n}", np.array(v, np.float32)) for n, v in numbers.items()
            )
            masked = insert(mask, "Sub", [one, mask], FLOAT)
            masked = insert(masked, "Mul", [masked, entry], FLOAT)
            self._padding[mask] = insert(masked, "Cast", [masked], INT32, to=INT32)
        return self._padding[mask]

    def _real(self, snake: _Snake) -> tuple[ir.Value, Array]:
        """The index where x is any number: the nearest entry."""
        low, high = snake.reach()
        scale = np.float32((high - low) / (ENTRIES - 1))
        zero = np.uint16(round(-low / float(scale)))
        x = (np.arange(ENTRIES) - int(zero)) * float(scale)
        limit, step, start = (
            constant(self._graph, f"{snake.quantize.outputs[0].name}.{name}", np.array(array))
            for name, array in {"limit": np.float32(x[-1]), "step": scale, "start": zero}.items()
        )
        clipped = insert(snake.x, "Clip", [snake.x, None, limit], FLOAT)
        # The standard operator has 16 bits from opset 21 on. Its lower end saturates at the first entry.
        quantize = ir.node("QuantizeLinear", [clipped, step, start], domain=MICROSOFT)
        quantize.outputs[0].dtype = ir.DataType.UINT16
        place(clipped, quantize)
        return insert(quantize.outputs[0], "Cast", quantize.outputs, INT32, to=INT32), x


def _snake(sine: ir.Node) -> _Snake | None:
    """The Snake around a sine, as the vocoder's export writes it, if all that use it want it quantized."""
    angle = _made_by(sine.inputs[0], "Mul") if sine.op_type == "Sin" else None
    if angle is None:
        return None
    square = _only_user(sine.outputs[0], "Mul")
    scaled = _only_user(square.outputs[0], "Mul") if square is not None else None
    total = _only_user(scaled.outputs[0], "Add") if scaled is not None else None
    quantize = _only_user(total.outputs[0], "QuantizeLinear") if total is not None else None
    if scaled is None or total is None or quantize is None:
        return None
    x, alpha, gain = angle.inputs[0], angle.inputs[1], scaled.inputs[1]
    if x is None or x not in total.inputs or alpha is None or alpha.const_value is None:
        return None
    return _Snake(x, _array(alpha).astype(np.float64), _array(gain).astype(np.float64), quantize)


def _made_by(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The one node that uses a value, if it is of this kind."""
    nodes = {use.node for use in value.uses()}
    node = nodes.pop() if len(nodes) == 1 else None
    return node if node is not None and node.op_type == operator else None


def _array(value: ir.Value | None) -> Array:
    assert value is not None
    assert value.const_value is not None
    array: Array = value.const_value.numpy()
    return array
