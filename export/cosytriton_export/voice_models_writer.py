"""Untrained speaker encoders and speech tokenizers, written the way the official files are.

For checkpoints with random weights: the graphs have the official inputs, outputs and layers, batch norms
folded by the exporter and layer norms whole or as arithmetic, as in the official files. Weights are drawn so
that signals keep their strength from layer to layer and different recordings give different embeddings and
tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.campplus import CamPPlus, CamPPlusSizes, Context
from cosytriton_export.features import WHISPER_BINS
from cosytriton_export.speech_tokenizer import SpeechTokenizer, SpeechTokenizerSizes, Version
from cosytriton_export.stft import length_mask
from cosytriton_export.weights import load_weights

_CAMPPLUS_OPSET = 17
# 17 is the first with LayerNormalization; versions 1 and 3 hold layer norms as their arithmetic.
_TOKENIZER_OPSETS: dict[Version, int] = {1: 16, 2: 17, 3: 16}
_TRACE_FRAMES = 230  # three segments of CAM++ after its stride


def write_campplus_onnx(path: Path, sizes: CamPPlusSizes, seed: int) -> None:
    """Write an untrained `campplus.onnx`: `input` float32 [B, T, 80] -> `output` [B, embedding]."""
    module = _WholeClips(CamPPlus(sizes, _PooledContext))
    _randomise(module, seed)
    axes = {"input": {0: "batch_size", 1: "frame_num"}, "output": {0: "batch_size"}}
    _write(path, module, (torch.randn(1, _TRACE_FRAMES, 80),), axes, _CAMPPLUS_OPSET)


def write_speech_tokenizer_onnx(path: Path, sizes: SpeechTokenizerSizes, seed: int) -> None:
    """Write an untrained `speech_tokenizer_v1.onnx`, `_v2.onnx` or `_v3.onnx`, as `sizes.version` says.

    `feats` float32 [1, 128, T] and `feats_length` int32 [1] -> `indices` int32 [1, ceil(T / 4)], in version 1
    [1, ceil(T / 2)].
    """
    module = _Indices(SpeechTokenizer(sizes))
    _randomise(module, seed)
    if sizes.version == 1:
        _place_codewords(module.tokenizer, sizes, seed)
    feats = torch.randn(1, WHISPER_BINS, _TRACE_FRAMES)
    length = torch.tensor([_TRACE_FRAMES], dtype=torch.int32)
    axes = {"feats": {2: "T"}, "feats_length": {}, "indices": {1: "N"}}
    _write(path, module, (feats, length), axes, _TOKENIZER_OPSETS[sizes.version])


class _WholeClips(nn.Module):
    """CAM++ without lengths: every frame is valid."""

    def __init__(self, campplus: CamPPlus) -> None:
        super().__init__()
        self.campplus = campplus

    def forward(self, features: Tensor) -> Tensor:
        batch, frames, _ = features.shape
        embedding: Tensor = self.campplus(features, torch.full((batch, 1), frames, dtype=torch.int32))
        return embedding


class _PooledContext(Context):
    """Segment means by pooling, as the official network computes them for clips without padding."""

    def __init__(self, frames: Tensor, length: int, segment: int) -> None:
        self.mask, self._length, self._segment = length_mask(frames, length), length, segment

    def of(self, hidden: Tensor) -> Tensor:
        segments = functional.avg_pool1d(hidden, self._segment, self._segment, ceil_mode=True)  # [B, C, S]
        spread = segments.repeat_interleave(self._segment, dim=2)[:, :, : self._length]
        return hidden.mean(dim=2, keepdim=True) + spread  # [B, C, T]

    def spread(self, gate: Tensor) -> Tensor:
        return gate


class _Indices(nn.Module):
    """The tokenizer with a length vector, and without the count of tokens."""

    def __init__(self, tokenizer: SpeechTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, feats: Tensor, feats_length: Tensor) -> Tensor:
        indices: Tensor = self.tokenizer(feats, feats_length.unsqueeze(1))[0]
        return indices


def _randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            fan_in = layer.weight[0].numel()
            nn.init.normal_(layer.weight, 0, fan_in**-0.5, generator)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, 0, 0.1, generator)
        elif isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            _randomise_norm(layer, generator)


def _randomise_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, generator: torch.Generator) -> None:
    # A variance below one makes up for what the rectifiers take away.
    assert layer.running_mean is not None
    assert layer.running_var is not None
    nn.init.normal_(layer.running_mean, 0, 0.1, generator)
    nn.init.uniform_(layer.running_var, 0.3, 0.7, generator)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.8, 1.2, generator)
        nn.init.normal_(layer.bias, 0, 0.1, generator)


def _place_codewords(tokenizer: SpeechTokenizer, sizes: SpeechTokenizerSizes, seed: int) -> None:
    # Hidden states point in similar directions. Codewords around those of noise are told apart; codewords in
    # all directions would leave a handful of tokens.
    generator = torch.Generator().manual_seed(seed)
    features = 0.5 * torch.randn(1, WHISPER_BINS, _TRACE_FRAMES, generator=generator)
    with torch.inference_mode():
        hidden, _ = tokenizer.encoder(features, torch.tensor([[_TRACE_FRAMES]], dtype=torch.int32))
        directions = functional.normalize(hidden[0], dim=1)  # [tokens, width]
        offsets = torch.randn(sizes.codewords, sizes.width, generator=generator) * directions.std(dim=0)
        codewords = functional.normalize(directions.mean(dim=0) + offsets, dim=1)
    load_weights(tokenizer, tokenizer.state_dict() | {"quantizer._codebook.embed": codewords}, "drawn")


def _write(
    path: Path,
    module: nn.Module,
    arguments: tuple[Tensor, ...],
    axes: dict[str, dict[int, str]],
    opset: int,
) -> None:
    names, draft = list(axes), path.with_name(f".{path.name}.draft")
    with warnings.catch_warnings():
        # The official files come from this older exporter; torch announces its end at every call.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            arguments,
            draft,
            input_names=names[:-1],
            output_names=names[-1:],
            dynamic_axes=axes,
            opset_version=opset,
            dynamo=False,
        )
    draft.replace(path)
