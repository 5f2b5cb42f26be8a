"""CAM++, the speaker encoder, for batches of recordings with unequal lengths.

Source: "CAM++: A Fast and Efficient Network for Speaker Verification Using Context-Aware Masking"
(arXiv 2303.00332). Attribute names are those of the official state dict. The weights of a checkpoint come
from its `campplus.onnx` (`cosytriton_export.campplus_reader`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_ensemble.pipeline import MEL_BINS, SPEAKER_SIZE
from cosytriton_export.stft import length_mask

_HEAD_STRIDES = 8  # the head halves the frequency axis three times


@dataclass(frozen=True, slots=True)
class CamPPlusSizes:
    """Widths and depths; the defaults are the official model's."""

    embedding: int = SPEAKER_SIZE
    head_channels: int = 32
    head_blocks: tuple[int, ...] = (2, 2)  # residual blocks per layer of the head
    initial: int = 128  # channels that enter the first dense block
    growth: int = 32  # channels that a dense layer adds
    bottleneck: int = 128  # channels inside a dense layer
    layers: tuple[int, ...] = (12, 24, 16)  # dense layers per block
    dilations: tuple[int, ...] = (1, 2, 2)  # of each block's local convolution
    segment: int = 100  # frames that share one local context


class CamPPlus(nn.Module):
    """Mean-normalised filter bank [B, T, 80] -> speaker embedding [B, embedding]."""

    def __init__(self, sizes: CamPPlusSizes, context: type[Context] | None = None) -> None:
        """`context` replaces `Context`, with the same methods."""
        super().__init__()
        self.head = _Head(sizes)
        self.xvector = _XVector(sizes, context or Context)

    def forward(self, features: Tensor, frames: Tensor) -> Tensor:
        """`features` float32 [B, T, 80] with `frames` int32 [B, 1] valid ones -> [B, embedding]."""
        mask = length_mask(frames, features.shape[1])  # [B, 1, T]
        hidden = self.head(features.transpose(1, 2) * mask, mask)  # [B, C * F, T]
        embedding: Tensor = self.xvector(hidden, frames)
        return embedding


class _Head(nn.Module):
    """Residual 2-D convolutions over frequency and time: [B, 80, T] -> [B, channels * 10, T]."""

    def __init__(self, sizes: CamPPlusSizes) -> None:
        super().__init__()
        width = sizes.head_channels
        self.conv1, self.bn1 = _conv2d(1, width), nn.BatchNorm2d(width)
        for index, blocks in enumerate(sizes.head_blocks, 1):
            layer = nn.ModuleList(_ResidualBlock(width, 1 if block else 2) for block in range(blocks))
            self.add_module(f"layer{index}", layer)
        self.conv2, self.bn2 = _conv2d(width, width, stride=2), nn.BatchNorm2d(width)
        self._layers = len(sizes.head_blocks)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(1)  # [B, 1, 1, T]
        hidden = functional.relu(self.bn1(self.conv1(features.unsqueeze(1)))) * mask  # [B, C, F, T]
        for index in range(1, self._layers + 1):
            layer = self.get_submodule(f"layer{index}")
            assert isinstance(layer, nn.ModuleList)
            for block in layer:
                hidden = block(hidden, mask)
        hidden = functional.relu(self.bn2(self.conv2(hidden))) * mask
        return hidden.flatten(1, 2)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv2d(channels, channels, stride=stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv2d(channels, channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(_conv2d(channels, channels, kernel=1, stride=stride))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(hidden))) * mask
        inner = self.bn2(self.conv2(inner)) + self.shortcut(hidden)
        return functional.relu(inner) * mask


class _XVector(nn.Module):
    """Densely connected time-delay network with statistics pooling: [B, C, T] -> [B, embedding]."""

    def __init__(self, sizes: CamPPlusSizes, context: type[Context]) -> None:
        super().__init__()
        width = sizes.initial
        head_width = sizes.head_channels * MEL_BINS // _HEAD_STRIDES
        linear = nn.Conv1d(head_width, width, 5, stride=2, padding=2, bias=False)
        self.tdnn = _named(linear=linear, nonlinear=_norm_relu(width))
        for index, (depth, dilation) in enumerate(zip(sizes.layers, sizes.dilations, strict=True), 1):
            self.add_module(f"block{index}", _DenseBlock(width, depth, dilation, sizes))
            width += depth * sizes.growth
            linear = nn.Conv1d(width, width // 2, 1, bias=False)
            self.add_module(f"transit{index}", _named(nonlinear=_norm_relu(width), linear=linear))
            width //= 2
        self.out_nonlinear = _norm_relu(width)
        norm = _named(batchnorm=nn.BatchNorm1d(sizes.embedding, affine=False))
        self.dense = _named(linear=nn.Conv1d(2 * width, sizes.embedding, 1, bias=False), nonlinear=norm)
        self._blocks, self._segment, self._context = len(sizes.layers), sizes.segment, context

    def forward(self, hidden: Tensor, frames: Tensor) -> Tensor:
        hidden = self.tdnn(hidden)  # [B, C, (T - 1) // 2 + 1]
        frames = (frames + 1) // 2
        context = self._context(frames, hidden.shape[2], self._segment)
        for index in range(1, self._blocks + 1):
            hidden = self.get_submodule(f"block{index}")(hidden, context)
            hidden = self.get_submodule(f"transit{index}")(hidden)
        pooled = _statistics(self.out_nonlinear(hidden), context.mask, frames)  # [B, 2 * C]
        embedding: Tensor = self.dense(pooled.unsqueeze(2)).squeeze(2)
        return embedding


class Context:
    """What context-aware masking looks at: the mean of a row plus the mean of the segment around a frame.

    All frames of a segment share one context, so the gate is computed once a segment and then spread.
    """

    def __init__(self, frames: Tensor, length: int, segment: int) -> None:
        """`frames` int32 [B, 1] valid ones of `length`; a segment is `segment` frames, the last one fewer."""
        self.mask = length_mask(frames, length)  # [B, 1, T]
        own = torch.arange(length, device=frames.device) // segment  # [T]
        segments = torch.arange((length + segment - 1) // segment, device=frames.device)  # [S]
        self._members = (segments[:, None] == own).float()  # [S, T], one segment per frame
        members = self.mask * self._members  # [B, S, T]
        shares = members / members.sum(dim=2, keepdim=True).clamp(min=1)
        self._means = (shares + self.mask / frames.clamp(min=1).unsqueeze(2)).transpose(1, 2)  # [B, T, S]

    def of(self, hidden: Tensor) -> Tensor:
        """Each segment's context: [B, C, T] -> [B, C, S]."""
        return hidden @ self._means

    def spread(self, gate: Tensor) -> Tensor:
        """Give every frame what its segment has: [B, C, S] -> [B, C, T]."""
        return gate @ self._members


class _DenseBlock(nn.Module):
    def __init__(self, width: int, depth: int, dilation: int, sizes: CamPPlusSizes) -> None:
        super().__init__()
        for index in range(depth):
            layer = _DenseLayer(width + index * sizes.growth, dilation, sizes)
            self.add_module(f"tdnnd{index + 1}", layer)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        for layer in self.children():
            hidden = torch.cat([hidden, layer(hidden, context)], dim=1)
        return hidden


class _DenseLayer(nn.Module):
    def __init__(self, width: int, dilation: int, sizes: CamPPlusSizes) -> None:
        super().__init__()
        self.nonlinear1 = _norm_relu(width)
        self.linear1 = nn.Conv1d(width, sizes.bottleneck, 1, bias=False)
        self.nonlinear2 = _norm_relu(sizes.bottleneck)
        self.cam_layer = _MaskedConvolution(sizes.bottleneck, sizes.growth, dilation)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        hidden = self.nonlinear2(self.linear1(self.nonlinear1(hidden))) * context.mask
        masked: Tensor = self.cam_layer(hidden, context)
        return masked


class _MaskedConvolution(nn.Module):
    """A local convolution whose channels are weighted by what the context says (context-aware masking)."""

    def __init__(self, channels: int, growth: int, dilation: int) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(channels, growth, 3, padding=dilation, dilation=dilation, bias=False)
        self.linear1 = nn.Conv1d(channels, channels // 2, 1)
        self.linear2 = nn.Conv1d(channels // 2, growth, 1)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        gate = self.linear2(functional.relu(self.linear1(context.of(hidden)))).sigmoid()
        weighted: Tensor = self.linear_local(hidden) * context.spread(gate)
        return weighted


def _statistics(hidden: Tensor, mask: Tensor, frames: Tensor) -> Tensor:
    """Mean and unbiased standard deviation over the valid frames: [B, C, T] -> [B, 2 * C]."""
    mean = (hidden * mask).sum(dim=2) / frames.clamp(min=1)  # [B, C]
    deviation = (hidden - mean.unsqueeze(2)) * mask
    variance = (deviation * deviation).sum(dim=2) / (frames - 1).clamp(min=1)
    return torch.cat([mean, variance.sqrt()], dim=1)


def _conv2d(channels: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    # The stride runs over frequency alone.
    return nn.Conv2d(channels, width, kernel, stride=(stride, 1), padding=kernel // 2, bias=False)


def _norm_relu(channels: int) -> nn.Sequential:
    return _named(batchnorm=nn.BatchNorm1d(channels), relu=nn.ReLU())


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))
