"""The served graph of the language model: one ONNX file for prefill and decoding.

Inputs `input_ids`, `past_counts`, `new_counts` and a key and a value cache per layer; outputs `logits` of
each row's last new position and the caches with the new positions written. Rows of one batch may stand at
different positions. An output cache may be bound to the memory of its input: the update is in place.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F  # noqa: N812 (the usual name)

from cosytriton_export.errors import ExportError
from cosytriton_export.graph import save_model
from cosytriton_export.llm import BACKBONE, LanguageModel

METADATA_KEY = "cosytriton.llm"
"""The `metadata_props` key under which the graph says its ids and sizes, as JSON."""

OPSET = 24  # the first with TensorScatter
_TRACE_BATCH, _TRACE_NEW, _TRACE_CAPACITY = 2, 3, 64  # torch.export specialises on 0 and 1


class ServedLanguageModel(nn.Module):
    """The language model behind ids: `forward` is the served graph."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.embedding = nn.Parameter(model.embedding_table().detach(), requires_grad=False)
        # The official names, so that a weight of the graph is found again in the checkpoint.
        self.llm, self.llm_decoder = model.llm, model.llm_decoder

    def forward(
        self,
        input_ids: Tensor,
        past_counts: Tensor,
        new_counts: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run new ids behind the cached positions.

        `input_ids` INT32 [batch, new] are of the id space and padded on the right, `past_counts` INT32
        [batch] the positions that are already in the caches, `new_counts` INT32 [batch] the valid new ids,
        and the caches one FP32 [batch, kv_heads, capacity, head_dim] per layer. Padding is written too:
        past_counts + new <= capacity must hold in every row. Returns the logits [batch, speech_rows] at the
        last valid new position (without a valid one, of the first) and the updated caches.
        """
        backbone = self.llm.get_submodule(BACKBONE)
        hidden, keys, values = backbone(
            F.embedding(input_ids, self.embedding), past_counts, key_caches, value_caches
        )
        last = (new_counts - 1).clamp(min=0).long()[:, None, None].expand(-1, 1, hidden.shape[2])
        return self.llm_decoder(hidden.gather(1, last)).squeeze(1), keys, values


def export_llm(model: LanguageModel, path: Path) -> None:
    """Write the served graph to `path`; it appears complete or not at all.

    Raises `ExportError`: the model cannot be traced, or the ONNX checker refuses the graph.
    """
    save_model(llm_model(model), path)


def llm_model(model: LanguageModel) -> ir.Model:
    """Trace the served graph into memory.

    Raises `ExportError`: the model cannot be traced.
    """
    layers = range(model.sizes.num_hidden_layers)
    caches = [f"{kind}_cache{{}}.{layer}" for kind in ("key", "value") for layer in layers]
    batch, new, capacity = Dim("batch"), Dim("new"), Dim("capacity")
    cache_axes = [{0: batch, 2: capacity} for _ in layers]
    try:
        program = torch.onnx.export(
            ServedLanguageModel(model).eval(),
            _sample(model),
            input_names=["input_ids", "past_counts", "new_counts", *(name.format("") for name in caches)],
            output_names=["logits", *(name.format("_out") for name in caches)],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: batch, 1: new}, {0: batch}, {0: batch}, cache_axes, cache_axes),
            optimize=False,  # only after the weights are transposed under their own names
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"the language model cannot be exported: {error}") from error
    if program is None:
        raise ExportError("the language model cannot be exported: the exporter gave no program.")
    _transpose_weights(program.model)
    program.optimize()
    passes.ClearMetadataAndDocStringPass()(program.model)
    program.model.metadata_props[METADATA_KEY] = json.dumps(_metadata(model))
    return program.model


def _sample(model: LanguageModel) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    # No tensor stands here twice: the exporter would take two inputs for one.
    ids = torch.zeros(_TRACE_BATCH, _TRACE_NEW, dtype=torch.int32)
    past, new = (torch.ones(_TRACE_BATCH, dtype=torch.int32) for _ in range(2))
    keys, values = (model.empty_caches(_TRACE_BATCH, _TRACE_CAPACITY) for _ in range(2))
    return ids, past, new, keys, values


def _transpose_weights(model: ir.Model) -> None:
    """Store weights [in, out], as MatMul wants them: quantisers and runtimes look for a constant there."""
    for node in list(model.graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or weight.const_value is None:
            continue
        array = weight.const_value.numpy().transpose(node.attributes["perm"].as_ints())
        weight.const_value, weight.shape = ir.tensor(array, name=weight.name), ir.Shape(array.shape)
        node.outputs[0].replace_all_uses_with(weight)
        model.graph.remove(node, safe=True)


def _metadata(model: LanguageModel) -> dict[str, object]:
    ids, sizes = model.ids, model.sizes
    return {
        "speech_offset": ids.speech_offset,
        "speech_codes": ids.speech_codes,
        "speech_rows": ids.speech_rows,
        "sos_id": ids.sos_id,
        "task_id": ids.task_id,
        "eos_id": ids.stop_ids[0],
        "stop_ids": ids.stop_ids,
        "layers": sizes.num_hidden_layers,
        "kv_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "sampling": model.sampling,
    }
