"""The S3 tokenizer read from a checkpoint's `speech_tokenizer_v2.onnx`, by structure.

Layer norms, linear layers and convolutions are taken in execution order, whatever their names, and the
module that results is compared with the original graph on random input before anyone may use it.

What is taken for granted: heads are 64 wide, all layer norms of one kind share their epsilon, a linear
layer is MatMul (and Add) or Gemm, the key projection is the one without bias, and the value projection is
the one that feeds the memory block. The official file itself was not at hand when this was written; its
node names, as the public converter of these weights lists them, agree with all of that. A file that does
not is refused by the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import torch
from torch import Tensor

from cosytriton_export.errors import ExportError
from cosytriton_export.features import WHISPER_BINS
from cosytriton_export.onnx_reader import GraphReader, attribute, run_original
from cosytriton_export.speech_tokenizer import HEAD_WIDTH, SpeechTokenizer, SpeechTokenizerSizes
from cosytriton_export.weights import load_weights

SOURCE = "speech_tokenizer_v2.onnx"
ROUNDING_MARGIN = 1e-3
"""A token may differ from the original's only where a digit lies this close to a rounding border."""

_LINEARS_PER_BLOCK = 6  # query, key, value, out, two of the feed-forward part
_TRIAL_FRAMES = 211  # no multiple of four


def read_speech_tokenizer(model: onnx.ModelProto) -> SpeechTokenizer:
    """Build the module from the graph, in evaluation mode.

    Raises:
        ExportError: the graph is not this tokenizer; the message says what was not understood.
    """
    sizes, state = _Structure(GraphReader(model, SOURCE)).read()
    module = SpeechTokenizer(sizes).eval()
    load_weights(module, state, SOURCE)
    _verify(module, model)
    return module


def _verify(module: SpeechTokenizer, model: onnx.ModelProto) -> None:
    generator = torch.Generator().manual_seed(0)
    features = 0.5 * torch.randn(1, WHISPER_BINS, _TRIAL_FRAMES, generator=generator)
    frames = torch.tensor([_TRIAL_FRAMES], dtype=torch.int32)
    output = run_original(model, SOURCE, (features.numpy(), frames.numpy()))
    expected = torch.from_numpy(output).flatten()
    with torch.inference_mode():
        hidden, _ = module.encoder(features, frames[:, None])
        given, levels = module.quantizer(hidden)[0], module.quantizer._codebook.levels(hidden)[0]
    certain = ((levels.abs() - 0.5).abs() > ROUNDING_MARGIN).all(dim=1)  # [T]
    if given.shape != expected.shape or bool(((given != expected) & certain).any()):
        raise ExportError(
            f"{SOURCE}: the network read from it gives other tokens than the file's own graph "
            f"({given.tolist()[:8]} instead of {expected.tolist()[:8]}). Its structure differs from the "
            "S3 tokenizer v2 somewhere."
        )


@dataclass(frozen=True)
class _Linear:
    node: onnx.NodeProto
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def state(self, key: str) -> dict[str, Tensor]:
        bias = {} if self.bias is None else {f"{key}.bias": self.bias}
        return {f"{key}.weight": self.weight, **bias}


@dataclass(frozen=True)
class _LayerNorm:
    last: onnx.NodeProto  # gives the normalised tensor
    weight: Tensor
    bias: Tensor
    epsilon: float

    def state(self, key: str) -> dict[str, Tensor]:
        return {f"{key}.weight": self.weight, f"{key}.bias": self.bias}


class _Structure:
    """The graph's layers by kind, in execution order."""

    def __init__(self, reader: GraphReader) -> None:
        self.reader = reader
        convs = [node for node in reader.nodes if node.op_type == "Conv"]
        self.convs = [node for node in convs if attribute(node, "group", 1) == 1]
        self.memories = [node for node in convs if attribute(node, "group", 1) > 1]
        self.linears = [linear for node in reader.nodes if (linear := self._linear(node))]
        self.norms = [norm for node in reader.nodes if (norm := self._norm(node))]

    def read(self) -> tuple[SpeechTokenizerSizes, dict[str, Tensor]]:
        """Sizes and state dict of the module that computes the same."""
        layers = len(self.memories)
        self._check_counts(layers)
        state: dict[str, Tensor] = {}
        for name, node in zip(("conv1", "conv2"), self.convs, strict=True):
            state[f"encoder.{name}.weight"] = self.reader.weight(node, 1)
            state[f"encoder.{name}.bias"] = self.reader.weight(node, 2)
        for index in range(layers):
            state |= self._block(f"encoder.blocks.{index}", index)
        state |= self.linears[-1].state("quantizer._codebook.project_down")
        width = len(state["encoder.conv1.weight"])
        if width % HEAD_WIDTH:
            raise self.reader.error(f"its width {width} is no multiple of {HEAD_WIDTH}, the width of a head.")
        return SpeechTokenizerSizes(
            width=width,
            layers=layers,
            inner=len(state["encoder.blocks.0.mlp.0.weight"]),
            memory=state["encoder.blocks.0.attn.fsmn_block.weight"].shape[2],
            digits=len(self.linears[-1].weight),
            attention_epsilon=self._epsilon(self.norms[0::2]),
            feed_forward_epsilon=self._epsilon(self.norms[1::2]),
        ), state

    def _check_counts(self, layers: int) -> None:
        found = (len(self.convs), len(self.norms), len(self.linears))
        wanted = (2, 2 * layers, _LINEARS_PER_BLOCK * layers + 1)
        if not layers or found != wanted:
            raise self.reader.error(
                f"for {layers} FSMN memory blocks it has {found[0]} plain convolutions, {found[1]} layer "
                f"norms and {found[2]} linear layers; {wanted[0]}, {wanted[1]} and {wanted[2]} are expected."
            )
        strides = [attribute(node, "strides", [1])[0] for node in self.convs]
        if strides != [2, 2]:
            raise self.reader.error(
                f"its convolutions have the strides {strides}, [2, 2] (25 Hz) are expected."
            )

    def _block(self, key: str, index: int) -> dict[str, Tensor]:
        start = index * _LINEARS_PER_BLOCK
        query, key_, value = self._projections(index, self.linears[start : start + 3])
        out, inner, outer = self.linears[start + 3 : start + _LINEARS_PER_BLOCK]
        attention, feed_forward = self.norms[2 * index : 2 * index + 2]
        return {
            **attention.state(f"{key}.attn_ln"),
            **query.state(f"{key}.attn.query"),
            **key_.state(f"{key}.attn.key"),
            **value.state(f"{key}.attn.value"),
            **out.state(f"{key}.attn.out"),
            f"{key}.attn.fsmn_block.weight": self.reader.weight(self.memories[index], 1),
            **feed_forward.state(f"{key}.mlp_ln"),
            **inner.state(f"{key}.mlp.0"),
            **outer.state(f"{key}.mlp.2"),
        }

    def _projections(self, index: int, linears: list[_Linear]) -> tuple[_Linear, _Linear, _Linear]:
        """Query, key and value, told apart by what they feed and whether they have a bias."""
        value = self._feeding(self.memories[index], linears)
        keys = [linear for linear in linears if linear.bias is None]
        queries = [linear for linear in linears if linear.bias is not None and linear is not value]
        if value is None or len(keys) != 1 or len(queries) != 1:
            raise self.reader.error(
                f"query, key and value of block {index} cannot be told apart: one of three linear layers "
                "without bias (key) and one that feeds the memory block (value) are expected."
            )
        return queries[0], keys[0], value

    def _feeding(self, node: onnx.NodeProto, linears: list[_Linear]) -> _Linear | None:
        """The linear layer that a node's data comes from."""
        seen: set[str] = set()
        names = [node.input[0]]
        while names:
            producer = self.reader.producer(names.pop())
            if producer is None or producer.output[0] in seen:
                continue
            seen.add(producer.output[0])
            for linear in linears:
                if linear.node.output[0] == producer.output[0]:
                    return linear
            names += producer.input
        return None

    def _linear(self, node: onnx.NodeProto) -> _Linear | None:
        if node.op_type not in ("MatMul", "Gemm") or self.reader.constant(node.input[1]) is None:
            return None
        weight = self.reader.weight(node, 1)
        if node.op_type == "Gemm":
            bias = self.reader.weight(node, 2) if len(node.input) > 2 else None
            return _Linear(node, weight if attribute(node, "transB", 0) else weight.T, bias)
        return _Linear(node, weight.T.contiguous(), self._vector(self._only(node, "Add")))

    def _norm(self, node: onnx.NodeProto) -> _LayerNorm | None:
        if node.op_type == "LayerNormalization":
            weight, bias = self.reader.weight(node, 1), self.reader.weight(node, 2)
            return _LayerNorm(node, weight, bias, attribute(node, "epsilon", 1e-5))
        return self._decomposed_norm(node) if node.op_type == "Sqrt" else None

    def _decomposed_norm(self, root: onnx.NodeProto) -> _LayerNorm | None:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias, from its square root on."""
        variance = self.reader.producer(root.input[0])
        division = self._only(root, "Div")
        scaled = division and self._only(division, "Mul")
        shifted = scaled and self._only(scaled, "Add")
        weight, bias = self._vector(scaled or None), self._vector(shifted or None)
        if variance is None or variance.op_type != "Add" or not shifted or weight is None or bias is None:
            return None
        constants = [self.reader.constant(name) for name in variance.input]
        epsilon = [float(value) for value in constants if value is not None and value.numel() == 1]
        return _LayerNorm(shifted, weight, bias, epsilon[0]) if epsilon else None

    def _only(self, node: onnx.NodeProto, kind: str) -> onnx.NodeProto | None:
        """The single consumer of a node, if it is of that kind."""
        consumers = self.reader.consumers(node)
        return consumers[0] if len(consumers) == 1 and consumers[0].op_type == kind else None

    def _vector(self, node: onnx.NodeProto | None) -> Tensor | None:
        """The constant vector among a node's inputs."""
        values = [self.reader.constant(name) for name in node.input] if node else []
        vectors = [value for value in values if value is not None and value.dim() == 1]
        return vectors[0] if vectors else None

    def _epsilon(self, norms: list[_LayerNorm]) -> float:
        values = {norm.epsilon for norm in norms}
        if len(values) != 1:
            raise self.reader.error(f"its layer norms of one kind have several epsilons: {sorted(values)}.")
        return values.pop()
