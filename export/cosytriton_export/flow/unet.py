"""The velocity estimator of CosyVoice 1: a U-Net whose inner stages run at half the mel rate.

CosyVoice, arXiv 2407.05407, with the blocks of Matcha-TTS, arXiv 2309.03199. Its convolutions and norms see
both sides, so everything beyond a row's end is zeroed before each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from cosytriton_export.flow.estimator import (
    EXPANSION,
    TimeEmbedding,
    TransformerBlock,
    TransformerStack,
)
from cosytriton_export.flow.group_norm import MaskedGroupNorm
from cosytriton_export.flow.operators import mish

KERNEL = 3
GROUPS = 8


class Level(NamedTuple):
    """What is valid at one rate."""

    mask: Tensor  # [B, 1, T], ones and zeros
    bias: Tensor  # additive attention mask [B, 1, 1, T], 0 and `masks.HIDDEN`

    @classmethod
    def of(cls, bias: Tensor) -> Self:
        """Read the mask off the attention mask."""
        return cls((bias[:, 0] == 0).to(bias.dtype), bias)

    def halved(self) -> Level:
        """The same rows at half the rate; the last frame of an odd row alone makes one there."""
        return Level(self.mask[..., ::2], self.bias[..., ::2])


class Block(nn.Module):
    """Convolution, group norm, Mish."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [nn.Conv1d(inputs, outputs, KERNEL, padding=1), MaskedGroupNorm(GROUPS, outputs)]
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, inputs, T], mask [B, 1, T] -> [B, outputs, T]."""
        conv, norm = self.block
        return mish(norm(conv(x * mask), mask))


class ResnetBlock(nn.Module):
    """Two blocks with the time between them, and a residual."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_width, outputs))
        self.block1 = Block(inputs, outputs)
        self.block2 = Block(outputs, outputs)
        self.res_conv = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        """Input x [B, inputs, T], mask [B, 1, T], time [1, time_width] -> [B, outputs, T]."""
        hidden = self.block1(x, mask) + self.mlp(time)[..., None]
        out: Tensor = self.block2(hidden, mask) + self.res_conv(x)
        return out


class Downsample(nn.Module):
    """Halves the rate, rounded up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, KERNEL, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, (T + 1) // 2]."""
        out: Tensor = self.conv(x)
        return out


class Upsample(nn.Module):
    """Doubles the rate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, 2 * T]."""
        out: Tensor = self.conv(x)
        return out


class Stage(nn.ModuleList):
    """A ResNet block, transformer blocks and what follows; a list, because the key names number its parts."""

    def __init__(
        self, inputs: int, outputs: int, time_width: int, transformer: tuple[int, int, int], *after: nn.Module
    ) -> None:
        heads, head_width, blocks = transformer
        stack = TransformerStack(TransformerBlock(outputs, heads, head_width) for _ in range(blocks))
        super().__init__([ResnetBlock(inputs, outputs, time_width), stack, *after])

    def forward(self, x: Tensor, time: Tensor, level: Level) -> Tensor:
        """[B, inputs, T] -> [B, outputs, T]."""
        resnet, transformers = self[0], self[1]
        out: Tensor = transformers(resnet(x, level.mask, time), level.bias)
        return out

    def change_rate(self, x: Tensor, level: Level) -> Tensor:
        """[B, outputs, T] -> [B, outputs, T at the next stage's rate]."""
        out: Tensor = self[2](x * level.mask)
        return out


class ConditionalDecoder(nn.Module):
    """Noisy mel, encoder output, speaker and prompt mel to the velocity of the flow.

    Every stage but the last halves the rate on the way down and doubles it on the way up.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        channels: Sequence[int],
        heads: int,
        head_width: int,
        blocks: int,
        mid_stages: int,
    ) -> None:
        super().__init__()
        time, transformer = EXPANSION * channels[0], (heads, head_width, blocks)
        self.time_mlp = TimeEmbedding(inputs, time)
        self.down_blocks = nn.ModuleList(
            Stage(before, after, time, transformer, _last_conv(after) if is_last else Downsample(after))
            for before, after, is_last in _pairs([inputs, *channels])
        )
        self.mid_blocks = nn.ModuleList(
            Stage(channels[-1], channels[-1], time, transformer) for _ in range(mid_stages)
        )
        self.up_blocks = nn.ModuleList(
            Stage(2 * before, after, time, transformer, _last_conv(after) if is_last else Upsample(after))
            for before, after, is_last in _pairs([*channels[::-1], channels[0]])
        )
        self.final_block = Block(channels[0], channels[0])
        self.final_proj = nn.Conv1d(channels[0], outputs, 1)

    def embed_time(self, times: Tensor) -> Tensor:
        """Embed times [K] in 0..1; returns [K, time width]."""
        embedded: Tensor = self.time_mlp(times)
        return embedded

    def forward(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """Estimate the velocity.

        Args:
            x: noisy mel, encoder output, speaker and prompt mel along the channels, [B, inputs, T].
            time: one embedded time [1, time width].
            bias: additive attention mask [B, 1, 1, T]: 0 for a row's frames.

        The velocity is [B, outputs, T] and meaningless beyond a row's end.
        """
        levels, skips = [Level.of(bias)], []
        for _ in self.down_blocks[1:]:
            levels.append(levels[-1].halved())
        downs, ups = cast(Iterable[Stage], self.down_blocks), cast(Iterable[Stage], self.up_blocks)
        for down, level in zip(downs, levels, strict=True):
            skips.append(down(x, time, level))
            x = down.change_rate(skips[-1], level)
        for mid in self.mid_blocks:
            x = mid(x, time, levels[-1])
        for up, level, skip in zip(ups, levels[::-1], skips[::-1], strict=True):
            # Of an odd row one frame too many comes back.
            x = up(torch.cat((x.narrow(2, 0, skip.shape[2]), skip), dim=1), time, level)
            x = up.change_rate(x, level)
        velocity: Tensor = self.final_proj(self.final_block(x, levels[0].mask))
        return velocity


def _pairs(widths: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Pair each width with the next one and say whether it is the last pair."""
    pairs = list(pairwise(widths))
    return [(before, after, i == len(pairs) - 1) for i, (before, after) in enumerate(pairs)]


def _last_conv(channels: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, KERNEL, padding=1)
