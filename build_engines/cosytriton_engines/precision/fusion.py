"""Operators of ONNX Runtime's own in place of groups of standard ones, for graphs that only a CPU runs.

A step of a language model runs hundreds of operators on a few rows: what it does not spend on reading the
weights goes into starting them. Where a group is not found, the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.surgery import constant, insert, place, substitute
from cosytriton_ensemble.pipeline import MAX_POSITIONS
from cosytriton_ensemble.spec import Array

MICROSOFT = "com.microsoft"
_MIXING = ("Reshape", "Mul", "MatMul", "Add", "Softmax", "MatMul", "Reshape", "Transpose", "Reshape")
"""From the turned queries over the cached keys and values to what all heads have mixed."""


def fuse(model: ir.Model) -> ir.Model:
    """Use what ONNX Runtime has for decoders, in place."""
    model.opset_imports.setdefault(MICROSOFT, 1)
    group_attention(model)
    skip_norms(model)
    return model


def skip_norms(model: ir.Model) -> None:
    """Add a residual and normalise the sum in one operator, in place."""
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        total = _read(norm, 0)
        add = total.producer()
        if add is None or add.op_type != "Add":
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            domain=MICROSOFT,
            num_outputs=4,  # the sum is the last
            name=norm.name,
        )
        model.graph.insert_after(add, fused)
        _take_over(norm.outputs[0], fused.outputs[0])
        _take_over(total, fused.outputs[3])


def group_attention(model: ir.Model) -> None:
    """Turn, cache and attend in one operator, in place: rotary positions, grouped queries, a causal mask."""
    tables: dict[ir.Value, ir.Value] = {}
    counts: list[ir.Value] = []
    for node in [node for node in model.graph if node.op_type == "RotaryEmbedding"]:
        if (found := _Attention.around(node)) is None:
            continue
        counts = counts or _counts(model.graph)
        angles = [_table(value, tables) for value in node.inputs[1:3] if value is not None]
        found.replace([*counts, *angles])


@dataclass(frozen=True, slots=True)
class _Attention:
    """The operators of one attention layer around its rotary embedding.

    [projected, Reshape, Transpose, Split into what is turned and values], RotaryEmbedding, Split into queries
    and keys, two TensorScatter and `_MIXING`.
    """

    projected: ir.Value  # [batch, new, (heads + 2 * kv_heads) * head_dim]
    query: ir.Value  # [batch, heads, new, head_dim]
    key: ir.Value  # [batch, kv_heads, new, head_dim]
    keys: ir.Node
    values: ir.Node
    mixing: list[ir.Node]

    @classmethod
    def around(cls, rotary: ir.Node) -> Self | None:
        """Find the group, or None where the embedding stands in another one."""
        try:
            split = _producer(rotary, "Split")
            reshape = _producer(_producer(split, "Transpose"), "Reshape")
            query, key = _user(rotary.outputs[0], "Split").outputs
            keys, values = (_user(value, "TensorScatter") for value in (key, split.outputs[1]))
            return cls(_read(reshape, 0), query, key, keys, values, _chain(query, _MIXING))
        except LookupError:
            return None

    def replace(self, shared: Sequence[ir.Value]) -> None:
        """Put GroupQueryAttention in place of the group; `shared` are its counts and tables."""
        attributes = {
            "num_heads": _size(self.query, 1),
            "kv_num_heads": _size(self.key, 1),
            "scale": float(_array(_read(self.mixing[1], 1))),
            "do_rotary": 1,
        }
        caches = [_read(node, 0) for node in (self.keys, self.values)]
        inputs = [self.projected, None, None, *caches, *shared]
        name = f"{self.mixing[2].name}.GroupQueryAttention"
        node = ir.node("GroupQueryAttention", inputs, attributes, domain=MICROSOFT, num_outputs=3, name=name)
        last = self.mixing[-1].outputs[0]
        place(last, node)
        for old, new in zip((last, self.keys.outputs[0], self.values.outputs[0]), node.outputs, strict=True):
            _take_over(old, new)


def _take_over(old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape = old.type, old.shape
    substitute(old, new)


def _read(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    array: Array = value.const_value.numpy()
    return array


def _size(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def _is(node: ir.Node | None, kind: str) -> ir.Node:
    if node is None or node.op_type != kind:
        raise LookupError(kind)
    return node


def _producer(node: ir.Node, kind: str) -> ir.Node:
    """The node of that kind that gives what a node reads first."""
    return _is(_read(node, 0).producer(), kind)


def _user(value: ir.Value, kind: str) -> ir.Node:
    """The only node of that kind that uses a value."""
    found = [use.node for use in value.uses() if use.node.op_type == kind]
    return _is(found[0] if len(found) == 1 else None, kind)


def _chain(value: ir.Value, kinds: tuple[str, ...]) -> list[ir.Node]:
    """Nodes of these kinds, each using what the one before gives."""
    nodes: list[ir.Node] = []
    for kind in kinds:
        nodes.append(_user(nodes[-1].outputs[0] if nodes else value, kind))
    return nodes


def _table(angles: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """Cosines or sines of all positions [positions, head_dim / 2], of a graph that computes them for some."""
    if angles not in made:
        function = angles.producer()
        assert function is not None
        product = _read(function, 0).producer()
        assert product is not None
        frequency = next(_array(value) for value in product.inputs if value is not None and value.const_value)
        turned: Array = np.arange(MAX_POSITIONS, dtype=np.float32)[:, None] * frequency.reshape(1, -1)
        array: Array = np.cos(turned) if function.op_type == "Cos" else np.sin(turned)
        graph = function.graph
        assert isinstance(graph, ir.Graph)
        made[angles] = constant(graph, f"{angles.name}.table", array)
    return made[angles]


def _counts(graph: ir.Graph) -> list[ir.Value]:
    """Positions of each row with its new ones, less one, INT32 [batch], and of the longest row, INT32 []."""
    inputs = {value.name: value for value in graph.inputs}
    ids, past, new = (inputs[name] for name in ("input_ids", "past_counts", "new_counts"))
    kind, one = ir.DataType.INT32, constant(graph, "one_position", np.array(1, np.int32))
    width = insert(ids, "Shape", [ids], ir.DataType.INT64, start=1, end=2)
    width = insert(width, "Squeeze", [width], ir.DataType.INT64)
    width = insert(width, "Cast", [width], kind, to=kind)
    longest = insert(width, "ReduceMax", [past], kind, keepdims=0)
    longest = insert(longest, "Add", [longest, width], kind)
    count = insert(longest, "Add", [past, new], kind)
    return [insert(count, "Sub", [count, one], kind), longest]
