"""Counts what a run of a graph computes, from ONNX Runtime's profile of it.

A profile has an event for each node that ran, in the bodies of loops one for each turn, with the shapes of
its inputs and outputs. A product is a node that multiplies and adds: a matrix product, a convolution,
attention.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]

_CONTAINERS = frozenset({"Loop", "If", "Scan"})  # the events of their bodies stand for them
_KERNEL = "_kernel_time"


def _matmul(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Each output adds as many products as the operands share; the first one may be transposed."""
    first, out = inputs[0], outputs[0]
    if len(first) < 2 or len(out) < 2:
        return math.prod(out) * first[-1]
    shared = first[-1] if first[-2] == out[-2] else first[-2]
    return math.prod(out) * shared


def _rows(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """A product whose weights are packed: each output adds a whole row of the first input."""
    return math.prod(outputs[0]) * inputs[0][-1]


def _conv(weight: int) -> Callable[[Sequence[Shape], Sequence[Shape]], int]:
    def count(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        return math.prod(outputs[0]) * math.prod(inputs[weight][1:])  # [out, in / groups, ...]

    return count


def _conv_transpose(inputs: Sequence[Shape], _: Sequence[Shape]) -> int:
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])  # [in, out / groups, ...]


def _attention(inputs: Sequence[Shape], _: Sequence[Shape]) -> int:
    """Scores and mixing: query [rows, n, width] or [rows, heads, n, width], key [rows, m, ...]."""
    query, key = inputs[0], inputs[1]
    return 2 * math.prod(query) * key[-2]


def _cached_attention(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """The same over a cache [rows, heads, capacity, width], as if every position of it were attended to."""
    return 2 * math.prod(outputs[0]) * inputs[1][2]


@dataclass(frozen=True, slots=True)
class _Product:
    """How a kind of node multiplies: its count, and which input has the weights."""

    count: Callable[[Sequence[Shape], Sequence[Shape]], int]
    weight: int = 1
    int8: bool = False
    matrix: bool = True  # its second operand may be computed too, by heads and rows, as in attention


_PRODUCTS: Mapping[str, _Product] = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "FusedGemm"), _Product(_matmul)),
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv"), _Product(_conv(1), matrix=False)),
    "ConvTranspose": _Product(_conv_transpose, matrix=False),
    **dict.fromkeys(("Attention", "MultiHeadAttention"), _Product(_attention)),
    "GroupQueryAttention": _Product(_cached_attention),
    **dict.fromkeys(
        ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _Product(_matmul, int8=True)
    ),
    **dict.fromkeys(("QLinearMatMul", "QGemm"), _Product(_matmul, weight=3, int8=True)),
    "MatMulNBits": _Product(_rows, int8=True, matrix=False),
    "ConvInteger": _Product(_conv(1), int8=True, matrix=False),
    "QLinearConv": _Product(_conv(3), weight=3, int8=True, matrix=False),
}
_BYTES = {"float": 4, "float16": 2, "int8": 1, "uint8": 1}


@dataclass(slots=True)
class Work:
    """What one run of a graph computes, and where its time goes.

    Attributes:
        fp32, int8: multiply-adds of products.
        weight_bytes: of the products' constant operands, anew in each turn of a loop.
        weights: how many numbers these are.
        seconds: by kind of node.

    """

    fp32: int = 0
    int8: int = 0
    weight_bytes: int = 0
    weights: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    @property
    def products(self) -> float:
        """Seconds inside products."""
        return sum(time for kind, time in self.seconds.items() if kind in _PRODUCTS)

    @property
    def rest(self) -> list[tuple[str, float]]:
        """The other kinds of nodes and their seconds, the longest first."""
        return [it for it in self.seconds.most_common() if it[0] not in _PRODUCTS]


def work_of(events: Iterable[Mapping[str, Any]], counted: bool = True) -> Work:
    """Sum up the events of a profile's last run; it cannot be `counted` without the shapes of weights."""
    work = Work()
    for event in last_run(list(events)):
        details = event["args"]
        kind = details["op_name"]
        if kind in _CONTAINERS:
            continue
        work.seconds[kind] += event["dur"] / 1e6
        if counted and kind in _PRODUCTS:
            _count(work, kind, details)
    return work


def last_run(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes' events within the last run of a session."""
    runs = [event for event in events if event["name"] == "model_run"]
    begin = max(event["ts"] for event in runs)
    nodes = (event for event in events if event.get("cat") == "Node" and event["name"].endswith(_KERNEL))
    return [event for event in nodes if event["ts"] >= begin]


def _count(work: Work, kind: str, details: Mapping[str, Any]) -> None:
    product = _PRODUCTS[kind]
    inputs, outputs = (_shapes(details[f"{side}_type_shape"]) for side in ("input", "output"))
    multiplied = product.count(inputs, outputs)
    work.int8 += multiplied * product.int8
    work.fp32 += multiplied * (not product.int8)
    weight = inputs[product.weight]
    if product.matrix and len(weight) > 2:
        return
    (kind_of_number,) = details["input_type_shape"][product.weight]
    work.weights += math.prod(weight)
    work.weight_bytes += math.prod(weight) * _BYTES[kind_of_number]


def _shapes(values: Iterable[Mapping[str, Sequence[int]]]) -> list[Shape]:
    return [tuple(*value.values()) for value in values]
