"""ONNX graph of the flow for streams.

Batch 1. Inputs `tokens` INT32 [1, tokens], `token_count` [1, 1], `prompt_tokens` [1, prompt_tokens],
`prompt_token_count` [1, 1], `prompt_mel` FP32 [1, frames, mel bins], `speaker_embedding` FP32 [1, 192] and
`token_end` INT32 [1, 1], as in `StreamingFlow.forward`; `attention_state.<layer>` FP32
[past, steps, 2, width] and `convolution_state` FP32 [steps, 2, n]. Outputs `mel` FP32 [1, new, mel bins] of
the frames from `past` up to those of `token_end`, `attention_state_out.<layer>` of these frames alone, and
`convolution_state_out`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from cosytriton_ensemble import names
from cosytriton_ensemble.streaming_flow import ATTENTION, CONVOLUTION, OUT, TOKEN_END
from cosytriton_export.errors import ExportError
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.flow.solver import STEPS
from cosytriton_export.flow.streaming import ROWS, StreamingFlow
from cosytriton_export.graph import OPSET, finish, save_model

SAID = ("tokens", "token_count", "prompt_tokens", "prompt_token_count", "prompt_mel", "speaker_embedding")
FRAMES, MEL = "frames", names.MEL
_PREFIX = "flow."  # the module's name for the flow
_CARRIED = 2  # values that an Euler step reads of the one before: its number and the mel


def export_streaming_flow(flow: CausalFlow, path: Path) -> None:
    """Write the graph to `path`. Raises `ExportError`: it cannot be traced, or is no valid ONNX."""
    save_model(streaming_flow_model(flow), path)


def streaming_flow_model(flow: CausalFlow) -> ir.Model:
    """Trace the graph in memory. Raises `ExportError`: it cannot be traced."""
    module = StreamingFlow(flow).eval()
    layers = range(module.state.layers)
    attention, after = ([f"{name}.{i}" for i in layers] for name in (ATTENTION, ATTENTION + OUT))
    axes = [{1: "tokens"}, {}, {1: "prompt_tokens"}, {}, {1: "prompt_frames"}, {}, {}, {0: "new"}]
    dynamic = torch.export.Dim.DYNAMIC
    shapes = [dict.fromkeys(axis, dynamic) for axis in axes]
    try:
        program = torch.onnx.export(
            module,
            _sample(module),
            input_names=[*SAID, TOKEN_END, FRAMES, *attention, CONVOLUTION],
            output_names=[MEL, *after, CONVOLUTION + OUT],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=(*shapes, [{0: dynamic} for _ in layers], {}),
            optimize=False,  # `finish` does it
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"the flow for streams cannot be exported: {error}") from error
    if program is None:
        raise ExportError("the flow for streams cannot be exported: the exporter gave no program.")
    model = finish(program)
    _stack_unread(model)
    _count_frames(model, flow.stride)
    _name(model, axes)
    passes.RemoveUnusedNodesPass()(model)
    return model


def _sample(module: StreamingFlow) -> tuple[object, ...]:
    # Every extent is another one, so that the tracer takes none for one of the others.
    block, stride = module.flow.block // module.flow.stride, module.flow.stride
    tokens, prompt_tokens, past, new = 3 * block + 1, block + 2, 2 * block, 2 * block - 3
    count = torch.tensor([[past + new - prompt_tokens]], dtype=torch.int32)
    shape = module.state
    return (
        torch.zeros(1, tokens, dtype=torch.int32),
        count,
        torch.zeros(1, prompt_tokens, dtype=torch.int32),
        torch.tensor([[prompt_tokens]], dtype=torch.int32),
        torch.zeros(1, stride * prompt_tokens + 5, module.flow.decoder.noise.shape[1]),
        torch.ones(1, module.flow.spk_embed_affine_layer.in_features),
        torch.tensor([[past + new]], dtype=torch.int32),
        torch.arange(stride * past, stride * (past + new)),
        [state.new_zeros(stride * past, *state.shape[1:]) for state in shape.empty()[0]],
        shape.empty()[1],
    )


def _stack_unread(model: ir.Model) -> None:
    """Let the loop give of every step what no later step reads, instead of that of the last step.

    The tracer knows loops that hand values on, but none that collect them.
    """
    (loop,) = (node for node in model.graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    read = 2 + _CARRIED  # a loop reads its limit, a body its number, and both a condition
    if any(value.uses() for value in body.inputs[read:]):
        raise ExportError("the flow for streams cannot be exported: a step reads what is only collected.")
    del body.inputs[read:]
    loop.resize_inputs(read)
    for value in loop.outputs[_CARRIED:]:
        name, shape = str(value.name), value.shape
        assert shape is not None
        value.shape = ir.Shape([STEPS, *shape])
        if name.startswith(ATTENTION):
            value.name = f"{name}.steps"
            _, _, new, width = value.shape
            turn = ir.node("Transpose", [value], {"perm": [2, 0, 1, 3]}, name=f"{name}/Transpose")
            turn.outputs[0].name, turn.outputs[0].type = name, value.type
            turn.outputs[0].shape = ir.Shape([new, STEPS, ROWS, width])
            model.graph.outputs[model.graph.outputs.index(value)] = turn.outputs[0]
            model.graph.append(turn)


def _count_frames(model: ir.Model, stride: int) -> None:
    """Compute the positions of the new frames, which the tracer took as an input, from the other inputs.

    The tracer wants every extent to be that of an input.
    """
    graph, inputs = model.graph, {value.name: value for value in model.graph.inputs}
    step, one = (_constant(graph, number) for number in (stride, 1))
    past = ir.node("Shape", [inputs[f"{ATTENTION}.0"]], {"start": 0, "end": 1})
    end = ir.node("Cast", [inputs[TOKEN_END]], {"to": ir.DataType.INT64})
    last = ir.node("Mul", [end.outputs[0], step])
    limits = [ir.node("Squeeze", [node.outputs[0]]) for node in (past, last)]
    made = ir.node("Range", [*(limit.outputs[0] for limit in limits), one])
    frames = inputs[FRAMES]
    made.outputs[0].type, made.outputs[0].shape = frames.type, frames.shape
    frames.replace_all_uses_with(made.outputs[0])
    graph.inputs.remove(frames)
    nodes = [past, end, last, *limits, made]
    for number, node in enumerate(nodes):
        node.name = node.outputs[0].name = f"{FRAMES}/{node.op_type}_{number}"  # of no value in the body
    graph.insert_before(graph[0], nodes)


def _constant(graph: ir.Graph, number: int) -> ir.Value:
    name = f"{FRAMES}/{number}"
    value = ir.val(name, const_value=ir.tensor(np.array(number), name=name))
    graph.register_initializer(value)
    return value


def _name(model: ir.Model, axes: list[dict[int, str]]) -> None:
    """Name weights and layers as in the flow that is no stream's, and the axes of the inputs and outputs."""
    for weight in list(model.graph.initializers.values()):
        weight.name = str(weight.name).removeprefix(_PREFIX)
    for node in model.graph.all_nodes():
        node.name = str(node.name).removeprefix(_PREFIX)
    for tensor, labels in zip(model.graph.inputs, axes, strict=False):
        for axis, name in labels.items():
            assert tensor.shape is not None
            tensor.shape[axis] = name
    for tensor in (*model.graph.inputs, *model.graph.outputs):
        assert tensor.shape is not None
        if str(tensor.name).startswith(ATTENTION):
            tensor.shape[0] = "new" if OUT in str(tensor.name) else "past"
        elif tensor.name == MEL:
            tensor.shape[1] = "new"
