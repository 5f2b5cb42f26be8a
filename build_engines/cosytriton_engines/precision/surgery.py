"""Surgery on ONNX graphs, and the sessions that try the result: what the quantizers share.

A graph holds its Euler loop as one ONNX Loop, so layers are looked for, changed and measured in its body too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as passes

from cosytriton_ensemble.spec import Array

EXTERNAL_DATA_BYTES = (
    1_800_000_000  # weights above this lie beside the graph: a protobuf message ends at 2 GiB
)
TABLE_ENTRIES = 100_000
LAYERS = ("MatMul", "Gemm", "Conv")
REAL = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def load(path: Path) -> ir.Model:
    """Read a graph in which every value has a type."""
    model = ir.load(path)
    if any(value.dtype is None for node in model.graph.all_nodes() for value in node.outputs):
        passes.ShapeInferencePass()(model)
    return model


def save(model: ir.Model, path: Path, inside: int = EXTERNAL_DATA_BYTES) -> None:
    """Write a graph, weights of more than `inside` bytes to `<path>.data`; what nobody uses is left out."""
    passes.RemoveUnusedNodesPass()(model)
    _make_names_unique(model)
    weights = sum(value.const_value.nbytes for value in initializers(model) if value.const_value is not None)
    if weights > inside:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        ir.save(ir.external_data.load_to_model(model), path)  # of a larger graph they lay beside it


def _make_names_unique(model: ir.Model) -> None:
    """Rename what new nodes named like something in another graph: each graph counts for itself."""
    given = [value for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values())]
    values: set[str | None] = {value.name for value in (*given, *model.graph.outputs)}
    nodes: set[str | None] = set()
    for number, node in enumerate(model.graph.all_nodes()):
        if node.name in nodes:
            node.name = f"{node.name}.{number}"
        nodes.add(node.name)
        for value in node.outputs:
            if value.name in values and value not in model.graph.outputs:
                value.name = f"{value.name}.{number}"
            values.add(value.name)


def initializers(model: ir.Model) -> list[ir.Value]:
    """Every constant of the graph and its bodies."""
    return [value for graph in model.graphs() for value in graph.initializers.values()]


def layers(model: ir.Model) -> dict[str, ir.Node]:
    """Layers with learned weights, by name."""
    return {str(node.name): node for node in model.graph.all_nodes() if is_layer(node)}


def is_layer(node: ir.Node) -> bool:
    """Whether the node is a product or a convolution with a learned weight.

    The export names weights as the checkpoint does, and the constants of signal processing otherwise.
    """
    weight = node.inputs[1] if node.op_type in LAYERS else None
    return weight is not None and weight.const_value is not None and str(weight.name).endswith(".weight")


def is_real(value: ir.Value | None) -> bool:
    """Whether the value is of a type that can be made half precision."""
    return value is not None and value.dtype in REAL


def is_lookup(node: ir.Node) -> bool:
    """Whether the node looks something up in a large constant: embeddings, or learned positions."""
    table = node.inputs[0].const_value if node.op_type in ("Gather", "Slice") and node.inputs[0] else None
    return table is not None and len(table.shape) >= 2 and table.size >= TABLE_ENTRIES


def type_of(value: ir.Value) -> ir.DataType:
    """The element type of a value of a loaded graph."""
    assert value.dtype is not None, value
    return value.dtype


def constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Register a constant."""
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def insert(
    behind: ir.Value,
    operator: str,
    inputs: Sequence[ir.Value | None],
    dtype: ir.DataType,
    **attributes: Any,
) -> ir.Value:
    """Insert a node directly behind the definition of a value; returns the node's output."""
    node = ir.node(operator, inputs, attributes)
    node.outputs[0].dtype = dtype
    place(behind, node)
    return node.outputs[0]


def place(behind: ir.Value, node: ir.Node) -> None:
    """Put a node behind the definition of a value."""
    producer = behind.producer()
    if producer is not None and producer.graph is not None:
        producer.graph.insert_after(producer, node)
        return
    graph = behind.graph
    assert graph is not None, behind
    graph.insert_before(graph[0], node)


def substitute(value: ir.Value, other: ir.Value) -> None:
    """Let everybody use another value, also as the graph's output, which keeps its name."""
    value.replace_all_uses_with(other, replace_graph_outputs=True)
    if other.is_graph_output():
        value.name, other.name = f"{value.name}.former", value.name
        other.type, other.shape = value.type, value.shape


def expose(model: ir.Model, values: Mapping[str, ir.Value]) -> None:
    """Make values outputs of the graph under new names; of a loop's body, one entry for each iteration."""
    loops = {
        attribute.as_graph(): node
        for node in model.graph.all_nodes()
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
    }
    for name, value in values.items():
        outer = value
        while outer.graph is not model.graph:
            assert isinstance(outer.graph, ir.Graph), value
            loop = loops[outer.graph]
            outer.graph.outputs.append(outer)
            loop.resize_outputs(len(loop.outputs) + 1)
            loop.outputs[-1].type, outer = outer.type, loop.outputs[-1]
        outer.name = name
        model.graph.outputs.append(outer)


def session(model: ir.Model) -> ort.InferenceSession:
    """Open a graph on the CPU, where every node runs as it stands."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(model, path)
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
