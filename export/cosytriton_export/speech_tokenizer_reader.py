"""An S3 tokenizer read from a checkpoint's `speech_tokenizer_v*.onnx`, by structure.

Layer norms, linear layers and convolutions are taken in execution order, whatever their names, and the
module that results is compared with the original graph on random input before anyone may use it.

What is taken for granted: heads are 64 wide, all layer norms of one kind share their epsilon, a linear
layer is MatMul (and Add) or Gemm, the key projection is the one without bias, the value projection is the one
that a block's second product of two computed matrices takes, and version 1 slices its table of positions and
multiplies by its codebook. The official files themselves were not at hand when this was written; their node
names, as the public converter of these weights lists them, agree with all of that. A file that does not is
refused by the comparison.
"""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import Tensor

from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.features import WHISPER_BINS
from cosytriton_export.onnx_layers import LayerNorm, Linear, layer_norms, linear_layers
from cosytriton_export.onnx_reader import GraphReader, attribute, run_original
from cosytriton_export.speech_tokenizer import (
    HEAD_WIDTH,
    MAX_FRAMES,
    STRIDES,
    SpeechTokenizer,
    SpeechTokenizerSizes,
    Version,
)
from cosytriton_export.weights import load_weights

DECISION_MARGIN = 1e-3
"""A token may differ from the original's only where another one is this close (`_Quantizer.margin`)."""

_LINEARS_PER_BLOCK = 6  # query, key, value, out, two of the feed-forward part
_TRIAL_FRAMES = 211  # no multiple of four


def source_name(version: Version) -> str:
    """The file in the official checkpoints: `speech_tokenizer_v1.onnx` and so on."""
    return f"speech_tokenizer_v{version}.onnx"


def read_speech_tokenizer(model: onnx.ModelProto, version: Version) -> SpeechTokenizer:
    """Build the module from the graph, in evaluation mode.

    Versions 2 and 3 are one network; the depth of all is the graph's.

    Raises:
        CheckpointError: the graph is the tokenizer of another version.
        ExportError: the graph is no such tokenizer; the message says what was not understood.
    """
    source = source_name(version)
    sizes, state = _Structure(GraphReader(model, source), version).read()
    module = SpeechTokenizer(sizes).eval()
    load_weights(module, state, source)
    _verify(module, model, source)
    return module


def _verify(module: SpeechTokenizer, model: onnx.ModelProto, source: str) -> None:
    generator = torch.Generator().manual_seed(0)
    features = 0.5 * torch.randn(1, WHISPER_BINS, _TRIAL_FRAMES, generator=generator)
    frames = torch.tensor([_TRIAL_FRAMES], dtype=torch.int32)
    output = run_original(model, source, (features.numpy(), frames.numpy()))
    expected = torch.from_numpy(output).flatten()
    with torch.inference_mode():
        hidden, _ = module.encoder(features, frames[:, None])
        given, margin = module.quantizer(hidden)[0], module.quantizer.margin(hidden)[0]
    if given.shape != expected.shape or bool(((given != expected) & (margin > DECISION_MARGIN)).any()):
        raise ExportError(
            f"{source}: the network read from it gives other tokens than the file's own graph "
            f"({given.tolist()[:8]} instead of {expected.tolist()[:8]}). Its structure differs from the "
            "S3 tokenizer of that version somewhere."
        )


class _Structure:
    """The graph's layers by kind, in execution order."""

    def __init__(self, reader: GraphReader, version: Version) -> None:
        self.reader, self.version = reader, version
        convs = [node for node in reader.nodes if node.op_type == "Conv"]
        self.convs = [node for node in convs if attribute(node, "group", 1) == 1]
        self.memories = [node for node in convs if attribute(node, "group", 1) > 1]
        self.linears, self.norms = linear_layers(reader), layer_norms(reader)
        taken = {linear.node.output[0] for linear in self.linears}
        products = [node for node in reader.nodes if node.op_type == "MatMul" and node.output[0] not in taken]
        self.mixings = products[1::2]  # each block's shares times values, after query times key

    def read(self) -> tuple[SpeechTokenizerSizes, dict[str, Tensor]]:
        """Sizes and state dict of the module that computes the same."""
        self._check_version()
        layers = len(self.norms) // 2 if self.version == 1 else len(self.memories)
        self._check_counts(layers)
        state: dict[str, Tensor] = {}
        for name, node in zip(("conv1", "conv2"), self.convs, strict=True):
            state[f"encoder.{name}.weight"] = self.reader.weight(node, 1)
            state[f"encoder.{name}.bias"] = self.reader.weight(node, 2)
        for index in range(layers):
            state |= self._block(f"encoder.blocks.{index}", index)
        width = len(state["encoder.conv1.weight"])
        if width % HEAD_WIDTH:
            raise self.reader.error(f"its width {width} is no multiple of {HEAD_WIDTH}, the width of a head.")
        own, own_state = self._codebook(width) if self.version == 1 else self._scalar_quantisation()
        return SpeechTokenizerSizes(
            version=self.version,
            width=width,
            layers=layers,
            inner=len(state["encoder.blocks.0.mlp.0.weight"]),
            attention_epsilon=self._epsilon(self.norms[0::2]),
            feed_forward_epsilon=self._epsilon(self.norms[1::2]),
            **own,
        ), state | own_state

    def _check_version(self) -> None:
        searches = any(node.op_type in ("ArgMax", "ArgMin", "TopK") for node in self.reader.nodes)
        if self.version == 1 and self.memories:
            found = "finite scalar quantisation, as CosyVoice 2 and 3 have"
        elif self.version > 1 and searches and not self.memories:
            found = "a codebook, as CosyVoice 1 has"
        else:
            return
        raise CheckpointError(
            f"{self.reader.source} holds a speech tokenizer with {found}. This checkpoint's language model "
            f"knows the tokens of another one: copy the {self.reader.source} of its own official release."
        )

    def _check_counts(self, layers: int) -> None:
        found = (len(self.convs), len(self.norms), len(self.mixings), len(self.linears))
        wanted = (2, 2 * layers, layers, _LINEARS_PER_BLOCK * layers + 1)
        if not layers or found != wanted:
            blocks = "pairs of layer norms" if self.version == 1 else "FSMN memory blocks"
            raise self.reader.error(
                f"for {layers} {blocks} it has {found[0]} plain convolutions, {found[1]} layer norms, "
                f"{found[2]} attentions and {found[3]} linear layers; {', '.join(map(str, wanted))} of them "
                "are expected."
            )
        strides = tuple(attribute(node, "strides", [1])[0] for node in self.convs)
        if strides != STRIDES[self.version]:
            raise self.reader.error(
                f"its convolutions have the strides {strides}, {STRIDES[self.version]} are expected."
            )

    def _block(self, key: str, index: int) -> dict[str, Tensor]:
        start = index * _LINEARS_PER_BLOCK
        query, key_, value = self._projections(index, self.linears[start : start + 3])
        out, inner, outer = self.linears[start + 3 : start + _LINEARS_PER_BLOCK]
        attention, feed_forward = self.norms[2 * index : 2 * index + 2]
        state = {
            **attention.state(f"{key}.attn_ln"),
            **query.state(f"{key}.attn.query"),
            **key_.state(f"{key}.attn.key"),
            **value.state(f"{key}.attn.value"),
            **out.state(f"{key}.attn.out"),
            **feed_forward.state(f"{key}.mlp_ln"),
            **inner.state(f"{key}.mlp.0"),
            **outer.state(f"{key}.mlp.2"),
        }
        if self.version > 1:
            state[f"{key}.attn.fsmn_block.weight"] = self.reader.weight(self.memories[index], 1)
        return state

    def _codebook(self, width: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What version 1 alone has: sizes and weights."""
        sliced = [
            self.reader.constant(node.input[0]) for node in self.reader.nodes if node.op_type == "Slice"
        ]
        tables = [table for table in sliced if table is not None and table.shape[1:] == (width,)]
        if len(tables) != 1 or len(tables[0]) < MAX_FRAMES // 2:
            found = ", ".join(str(len(table)) for table in tables) or "no"
            raise self.reader.error(
                f"its table of added positions has {found} rows, at least {MAX_FRAMES // 2} are expected."
            )
        codewords = self.linears[-1].weight
        sizes = {"positions": len(tables[0]), "codewords": len(codewords)}
        return sizes, {
            "encoder.positional_embedding": tables[0],
            "quantizer._codebook.embed": codewords,
        }

    def _scalar_quantisation(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What versions 2 and 3 alone have: sizes and weights."""
        projection = self.linears[-1]
        sizes = {"memory": self.reader.weight(self.memories[0], 1).shape[2], "digits": len(projection.weight)}
        return sizes, projection.state("quantizer._codebook.project_down")

    def _projections(self, index: int, linears: list[Linear]) -> tuple[Linear, Linear, Linear]:
        """Query, key and value, told apart by what they feed and whether they have a bias."""
        value = self._feeding(self.mixings[index].input[1], linears)
        keys = [linear for linear in linears if linear.bias is None]
        queries = [linear for linear in linears if linear.bias is not None and linear is not value]
        if value is None or len(keys) != 1 or len(queries) != 1:
            raise self.reader.error(
                f"query, key and value of block {index} cannot be told apart: one of three linear layers "
                "without bias (key) and one that the attention sums up (value) are expected."
            )
        return queries[0], keys[0], value

    def _feeding(self, name: str, linears: list[Linear]) -> Linear | None:
        """The linear layer that a tensor's data comes from."""
        seen: set[str] = set()
        names = [name]
        while names:
            producer = self.reader.producer(names.pop())
            if producer is None or producer.output[0] in seen or producer.op_type == "Shape":  # a length
                continue
            seen.add(producer.output[0])
            for linear in linears:
                if linear.node.output[0] == producer.output[0]:
                    return linear
            names += producer.input
        return None

    def _epsilon(self, norms: list[LayerNorm]) -> float:
        values = {norm.epsilon for norm in norms}
        if len(values) != 1:
            raise self.reader.error(f"its layer norms of one kind have several epsilons: {sorted(values)}.")
        return values.pop()
