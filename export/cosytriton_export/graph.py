"""ONNX graph from a stage's declaration and its PyTorch module.

The declaration names the inputs, outputs and dynamic axes; the module only computes. A loop that the
module writes as `torch.while_loop` becomes one ONNX Loop whose body is stored once.
"""

from __future__ import annotations

import ast
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from cosytriton_ensemble.spec import Dim, Stage, Tensor
from cosytriton_export.errors import ExportError

OPSET = 24  # 23 is the first with Attention
EXTERNAL_DATA_BYTES = 1_800_000_000
"""Weights above this go to `<name>.data` beside the graph: a protobuf message ends at 2 GiB."""

_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter's list of modules around a node, then its operation
_REARRANGING = ("Transpose", "Reshape", "Identity")  # a copy is an Identity
_TRACE_BATCH = 2  # torch.export specialises on 0 and 1


def export_stage(stage: Stage, module: nn.Module, path: Path, *, opset: int = OPSET) -> None:
    """Write the stage's graph to `path`.

    The module's `forward` takes the stage's inputs and returns a tuple of its outputs, both in declared
    order and with the batch first. The file appears complete or not at all. Raises `ExportError` when the
    module cannot be traced, or when its graph does not fit the declaration.
    """
    save_model(stage_model(stage, module, opset=opset), path)


def stage_model(stage: Stage, module: nn.Module, *, opset: int = OPSET) -> ir.Model:
    """Trace the stage's graph in memory, with the declared tensor and axis names and no debug metadata.

    Raises `ExportError` like `export_stage`.
    """
    feed = stage.sample("opt", batch=_TRACE_BATCH)
    arguments = tuple(torch.from_numpy(feed[tensor.name]) for tensor in stage.inputs)
    try:
        program = torch.onnx.export(
            module.eval(),
            arguments,
            input_names=[tensor.name for tensor in stage.inputs],
            output_names=[tensor.name for tensor in stage.outputs],
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=_dynamic_shapes(stage),
            optimize=False,  # `finish` does it
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(
            f"stage {stage.name!r}: {type(module).__name__} cannot be exported: {error}"
        ) from error
    if program is None:
        raise ExportError(f"stage {stage.name!r}: the exporter gave no program for {type(module).__name__}.")
    model = finish(program)
    _name_axes(stage, model)
    return model


def finish(program: torch.onnx.ONNXProgram) -> ir.Model:
    """Optimize a traced graph: weights stand as they are used, layers are named, debug metadata is gone."""
    _fold_weights(program.model)  # before the optimizer folds them under names of its own
    program.optimize()
    _name_layers(program.model)
    _strip_metadata(program.model)
    return program.model


def _fold_weights(model: ir.Model) -> None:
    """Store weights as they are used, [in, out] for MatMul: quantisers and runtimes look for constants."""
    for node in list(model.graph.all_nodes()):
        weight = node.inputs[0] if node.op_type in _REARRANGING else None
        if weight is None or weight.const_value is None or len(weight.uses()) > 1:
            continue
        result, array = node.outputs[0], weight.const_value.numpy()
        if result.is_graph_output():
            continue
        if node.op_type == "Transpose":
            array = array.transpose(node.attributes["perm"].as_ints())
        elif result.shape is None or not result.shape.is_static():
            continue
        else:
            array = array.reshape(result.shape.numpy())
        weight.const_value, weight.shape = ir.tensor(array, name=weight.name), ir.Shape(array.shape)
        result.replace_all_uses_with(weight)
        if node.graph is not None:
            node.graph.remove(node, safe=True)


def _name_layers(model: ir.Model) -> None:
    """Name each node `<module>/<operator>`, so that who reads of a layer finds it in the checkpoint.

    The module is that of the node's weight, or the one whose code the node comes from.
    """
    seen: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        weights = [v.name for v in node.inputs if v is not None and v.const_value is not None and v.name]
        *scopes, _ = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
        modules = [name for name in scopes if name and not name.startswith("_")]
        modules += [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
        name = "/".join((*modules[-1:], node.op_type))
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1


def save_model(model: ir.Model, path: Path) -> None:
    """Check the graph and write it to `path` (and its large weights beside it) through a temporary folder.

    Raises `ExportError` when the ONNX checker refuses the graph.
    """
    weights = sum(value.const_value.nbytes for value in _initializers(model) if value.const_value is not None)
    data_name = f"{path.name}.data"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder, path.name)
        ir.save(model, draft, external_data=data_name if weights > EXTERNAL_DATA_BYTES else None)
        try:
            onnx.checker.check_model(str(draft))
        except onnx.checker.ValidationError as error:
            raise ExportError(f"the graph for {path} is not valid ONNX: {error}") from error
        # The weights go first, so that a graph never stands there without them.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name != data_name):
            file.replace(path.with_name(file.name))


def _dynamic_shapes(stage: Stage) -> tuple[dict[int, object], ...]:
    # Only the batch is one symbol for all inputs; relations between the others are the module's affair.
    batch, axes = torch.export.Dim("batch"), stage.axes()
    return tuple(
        {axis: batch if axis == 0 else torch.export.Dim.DYNAMIC for axis in axes[tensor.name]}
        for tensor in stage.inputs
    )


def _initializers(model: ir.Model) -> list[ir.Value]:
    return [
        value for graph in (model.graph, *model.graph.subgraphs()) for value in graph.initializers.values()
    ]


def _strip_metadata(model: ir.Model) -> None:
    # Stack traces of the exporting machine do not belong into an artifact.
    model.metadata_props.clear()
    for graph in (model.graph, *model.graph.subgraphs()):
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()


def _name_axes(stage: Stage, model: ir.Model) -> None:
    """Check the graph against the declaration and give its symbolic axes the declared names."""
    names: dict[str, str] = {}
    for tensors, values in ((stage.inputs, model.graph.inputs), (stage.outputs, model.graph.outputs)):
        if [tensor.name for tensor in tensors] != [value.name for value in values]:
            raise ExportError(
                f"stage {stage.name!r}: the graph has {[value.name for value in values]}, "
                f"declared are {[tensor.name for tensor in tensors]}."
            )
        for tensor, value in zip(tensors, values, strict=True):
            names |= _name_tensor_axes(stage, tensor, value)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim) and str(dim) in names and value.shape is not None:
                    value.shape[axis] = names[str(dim)]


def _name_tensor_axes(stage: Stage, tensor: Tensor, value: ir.Value) -> dict[str, str]:
    """Name the axes of one input or output; returns the exporter's symbols with their declared names."""
    wanted = ("batch", *(dim.name if isinstance(dim, Dim) else dim for dim in tensor.dims))
    dtype, given = ir.DataType.from_numpy(np.dtype(tensor.numpy_type)), tuple(value.shape or ())
    fixed = any(isinstance(g, int) and g != w for g, w in zip(given, wanted, strict=False))
    if value.dtype != dtype or len(given) != len(wanted) or fixed:
        raise ExportError(
            f"stage {stage.name!r}: the graph gives {tensor.name!r} as {value.dtype} {list(given)}, "
            f"declared is {dtype} {list(wanted)}."
        )
    value.shape = ir.Shape(wanted)
    pairs = zip(given, wanted, strict=True)
    return {str(g): w for g, w in pairs if isinstance(g, ir.SymbolicDim) and isinstance(w, str)}
