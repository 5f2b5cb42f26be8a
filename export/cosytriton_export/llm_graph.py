"""The served graphs of a language model: one for prefill and decoding, and CosyVoice 1's text encoder.

Inputs `input_ids`, `past_counts`, `new_counts` and a key and a value cache per layer; outputs `logits` of
each row's last new position and the caches with the new positions written. Rows of one batch may stand at
different positions. An output cache may be bound to the memory of its input: the update is in place.
CosyVoice 1 also takes `embeddings`, for the positions whose id is negative.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F  # noqa: N812 (the usual name)

from cosytriton_ensemble.llm_spec import METADATA_KEY
from cosytriton_export.errors import ExportError
from cosytriton_export.graph import finish, save_model
from cosytriton_export.joined import join_products
from cosytriton_export.llm_base import LanguageModel
from cosytriton_export.llm_transformer import PromptEncoder, TransformerLM

TEXT_ENCODER = "text_encoder.onnx"
"""CosyVoice 1's text encoder, beside the language model's graph."""

OPSET = 24  # the first with TensorScatter
_TRACE_BATCH, _TRACE_NEW, _TRACE_CAPACITY = 2, 3, 64  # torch.export specialises on 0 and 1


class _Served(nn.Module):
    """The language model behind ids."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.backbone_name = model.BACKBONE
        self.embedding = nn.Parameter(model.embedding_table().detach(), requires_grad=False)
        # The official names, so that a weight of the graph is found again in the checkpoint.
        self.llm, self.llm_decoder = model.get_submodule("llm"), model.llm_decoder

    def _step(
        self,
        x: Tensor,
        past_counts: Tensor,
        new_counts: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        backbone = self.get_submodule(self.backbone_name)
        hidden, keys, values = backbone(x, past_counts, key_caches, value_caches)
        last = (new_counts - 1).clamp(min=0).long()[:, None, None].expand(-1, 1, hidden.shape[2])
        return self.llm_decoder(hidden.gather(1, last)).squeeze(1), keys, values


class ServedLanguageModel(_Served):
    """CosyVoice 2 and 3: `forward` is the served graph."""

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
        x = F.embedding(input_ids, self.embedding)
        return self._step(x, past_counts, new_counts, key_caches, value_caches)


class ServedTransformerLM(_Served):
    """CosyVoice 1: `forward` is the served graph."""

    def __init__(self, model: TransformerLM) -> None:
        super().__init__(model)
        model.llm.tabulate()

    def forward(
        self,
        input_ids: Tensor,
        embeddings: Tensor,
        past_counts: Tensor,
        new_counts: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run new ids and embeddings behind the cached positions, like `ServedLanguageModel`.

        Where an id is negative, the row of `embeddings` FP32 [batch, new, width] stands for it.
        """
        by_id = F.embedding(input_ids.clamp(min=0), self.embedding)
        x = torch.where(input_ids[:, :, None] < 0, embeddings, by_id)
        return self._step(x, past_counts, new_counts, key_caches, value_caches)


def served(model: LanguageModel) -> ServedLanguageModel | ServedTransformerLM:
    """Put the model behind the inputs of its graph."""
    if isinstance(model, TransformerLM):
        return ServedTransformerLM(model).eval()
    return ServedLanguageModel(model).eval()


def input_names(model: LanguageModel) -> list[str]:
    """List the graph's inputs before the caches."""
    embeddings = ["embeddings"] if isinstance(model, TransformerLM) else []
    return ["input_ids", *embeddings, "past_counts", "new_counts"]


def export_llm(model: LanguageModel, path: Path) -> None:
    """Write the served graph to `path`, CosyVoice 1's text encoder beside it.

    Each file appears complete or not at all. Raises `ExportError`: the model cannot be traced, or the ONNX
    checker refuses a graph.
    """
    if isinstance(model, TransformerLM):
        save_model(text_encoder_model(model), path.with_name(TEXT_ENCODER))
    save_model(llm_model(model), path)


def llm_model(model: LanguageModel) -> ir.Model:
    """Trace the served graph into memory.

    Raises `ExportError`: the model cannot be traced.
    """
    join_products(model)
    layers = range(model.cache.layers)
    caches = [f"{kind}_cache{{}}.{layer}" for kind in ("key", "value") for layer in layers]
    inputs = _sample(model)
    batch, new, capacity = Dim("batch"), Dim("new"), Dim("capacity")
    axes = [{0: batch, 1: new} if tensor.dim() > 1 else {0: batch} for tensor in inputs]
    cache_axes = [{0: batch, 2: capacity} for _ in layers]
    traced = _trace(
        served(model),
        (*inputs, *(model.empty_caches(_TRACE_BATCH, _TRACE_CAPACITY) for _ in range(2))),
        [*input_names(model), *(name.format("") for name in caches)],
        ["logits", *(name.format("_out") for name in caches)],
        (*axes, cache_axes, cache_axes),
    )
    traced.metadata_props[METADATA_KEY] = json.dumps(_metadata(model))
    return traced


def text_encoder_model(model: TransformerLM) -> ir.Model:
    """Trace the encoder of text and speaker into memory.

    Inputs `text_ids` INT32 [batch, new] and `speaker_embedding` FP32 [batch, 192], outputs `text_embeddings`
    FP32 [batch, new, width] and `speaker` FP32 [batch, 1, width].

    Raises `ExportError`: the model cannot be traced.
    """
    batch = Dim("batch")
    return _trace(
        PromptEncoder(model).eval(),
        (_ids(), torch.ones(_TRACE_BATCH, model.speaker_width)),
        ["text_ids", "speaker_embedding"],
        ["text_embeddings", "speaker"],
        ({0: batch, 1: Dim("new")}, {0: batch}),
    )


def _trace(
    module: nn.Module,
    arguments: tuple[Any, ...],
    inputs: list[str],
    outputs: list[str],
    axes: tuple[Any, ...],
) -> ir.Model:
    try:
        program = torch.onnx.export(
            module,
            arguments,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=axes,
            optimize=False,  # `finish` does it
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"the language model cannot be exported: {error}") from error
    if program is None:
        raise ExportError("the language model cannot be exported: the exporter gave no program.")
    return finish(program)


def _ids() -> Tensor:
    return torch.zeros(_TRACE_BATCH, _TRACE_NEW, dtype=torch.int32)


def _sample(model: LanguageModel) -> list[Tensor]:
    # No tensor stands here twice: the exporter would take two inputs for one.
    past, new = (torch.ones(_TRACE_BATCH, dtype=torch.int32) for _ in range(2))
    if isinstance(model, TransformerLM):
        return [_ids(), torch.zeros(_TRACE_BATCH, _TRACE_NEW, model.width), past, new]
    return [_ids(), past, new]


def _metadata(model: LanguageModel) -> dict[str, object]:
    ids, cache = model.ids, model.cache
    return {
        "text_encoder": isinstance(model, TransformerLM),
        "text_rows": ids.text_rows,
        "speech_offset": ids.speech_offset,
        "speech_codes": ids.speech_codes,
        "speech_rows": ids.speech_rows,
        "sos_id": ids.sos_id,
        "task_id": ids.task_id,
        "eos_id": ids.eos_id,
        "fill_id": ids.fill_id,
        "official_min_length_id": ids.official_min_length_id,
        "stop_ids": ids.stop_ids,
        "layers": cache.layers,
        "kv_heads": cache.heads,
        "head_dim": cache.head_dim,
        "sampling": model.decoding.sampling,
        "mix_ratio": model.decoding.mix_ratio,
    }
