"""The layers of the causal U-Net: ResNet blocks and transformer blocks at one rate.

CosyVoice 2, arXiv 2412.10117, with the blocks of Matcha-TTS, arXiv 2309.03199.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_export.flow.operators import attention

KERNEL = 3  # frames of every causal convolution
EXPANSION = 4  # of the time embedding and of the feed-forward layers
TIME_SCALE = 1000  # the flow's time 0..1 in the sinusoids' unit


def time_sinusoids(time: Tensor, width: int) -> Tensor:
    """Encode time [K] as [K, width]: all sines, then all cosines (Attention Is All You Need)."""
    half = width // 2
    octave = torch.arange(half, device=time.device, dtype=torch.float32)
    angle = TIME_SCALE * time[:, None] * torch.exp(octave * (-math.log(10_000) / (half - 1)))
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class CausalConv(nn.Conv1d):
    """Convolution that sees the present and the past."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, KERNEL)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, T] -> [B, outputs, T]."""
        return super().forward(F.pad(x, (KERNEL - 1, 0)))


class Transpose(nn.Module):
    """[B, T, C] <-> [B, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        """Swap the last two axes."""
        return x.transpose(1, 2)


class CausalBlock(nn.Module):
    """Causal convolution, norm over the channels, Mish."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # The index of each part is part of the official key names.
        self.block = nn.Sequential(
            CausalConv(inputs, outputs), Transpose(), nn.LayerNorm(outputs), Transpose(), nn.Mish()
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, T] -> [B, outputs, T]."""
        out: Tensor = self.block(x)
        return out


class ResnetBlock(nn.Module):
    """Two causal blocks with the time between them, and a residual."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_width, outputs))
        self.block1 = CausalBlock(inputs, outputs)
        self.block2 = CausalBlock(outputs, outputs)
        self.res_conv = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Input x [B, inputs, T], time [1, time_width] -> [B, outputs, T]."""
        hidden = self.block1(x) + self.mlp(time)[..., None]
        out: Tensor = self.block2(hidden) + self.res_conv(x)
        return out


class Attention(nn.Module):
    """Multi-head self-attention without positions: the convolutions bring them."""

    def __init__(self, channels: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(channels, heads * head_width, bias=False)
        self.to_k = nn.Linear(channels, heads * head_width, bias=False)
        self.to_v = nn.Linear(channels, heads * head_width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(heads * head_width, channels)])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend: x [B, T, C], bias [B, 1, T, T] -> [B, T, C]."""
        mixed = attention(self.to_q(x), self.to_k(x), self.to_v(x), bias, self.heads)
        attended: Tensor = self.to_out[0](mixed)
        return attended


class Gelu(nn.Module):
    """Linear layer and exact GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.gelu(self.proj(x))


class FeedForward(nn.Module):
    """The transformer block's second half."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = EXPANSION * channels
        # The official list has dropout between the two.
        self.net = nn.Sequential(Gelu(channels, hidden), nn.Identity(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        out: Tensor = self.net(x)
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, channels: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn1 = Attention(channels, heads, head_width)
        self.norm3 = nn.LayerNorm(channels)
        self.ff = FeedForward(channels)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        attended: Tensor = x + self.attn1(self.norm1(x), bias)
        out: Tensor = attended + self.ff(self.norm3(attended))
        return out


class TransformerStack(nn.ModuleList):
    """Transformer blocks, one after another."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        x = x.transpose(1, 2)  # [B, T, C]
        for block in self:
            x = block(x, bias)
        return x.transpose(1, 2)


class Stage(nn.ModuleList):
    """A ResNet block and a stack of transformer blocks; a list, because the key names number its parts."""

    def __init__(self, inputs: int, channels: int, heads: int, head_width: int, blocks: int) -> None:
        transformers = (TransformerBlock(channels, heads, head_width) for _ in range(blocks))
        resnet = ResnetBlock(inputs, channels, EXPANSION * channels)
        super().__init__([resnet, TransformerStack(transformers)])

    def forward(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """[B, inputs, T] -> [B, C, T]."""
        resnet, transformers = self[0], self[1]
        out: Tensor = transformers(resnet(x, time), bias)
        return out


class OuterStage(Stage):
    """A stage with a causal convolution at its end, where the official network would change the rate."""

    def __init__(self, inputs: int, channels: int, heads: int, head_width: int, blocks: int) -> None:
        super().__init__(inputs, channels, heads, head_width, blocks)
        self.append(CausalConv(channels, channels))

    def convolve(self, x: Tensor) -> Tensor:
        """Apply the convolution: [B, C, T] -> [B, C, T]."""
        out: Tensor = self[2](x)
        return out


class TimeEmbedding(nn.Module):
    """Two linear layers over the sinusoids of the time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, outputs)
        self.linear_2 = nn.Linear(outputs, outputs)

    def forward(self, time: Tensor) -> Tensor:
        """Times [K] in 0..1 -> [K, outputs]."""
        sinusoids = time_sinusoids(time, self.linear_1.in_features)
        embedded: Tensor = self.linear_2(F.silu(self.linear_1(sinusoids)))
        return embedded
