"""The S3 speech tokenizer of CosyVoice 2, for batches of recordings with unequal lengths.

Source: "CosyVoice 2: Scalable Streaming Speech Synthesis with Large Language Models" (arXiv 2412.10117):
a Whisper-like encoder with rotary positions and FSMN memory blocks ("FSMN", arXiv 1803.05030), then finite
scalar quantisation ("FSQ", arXiv 2309.15505). Attribute names are those of the published PyTorch weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_ensemble.pipeline import PROMPT_TOKENS
from cosytriton_export.features import WHISPER_BINS
from cosytriton_export.stft import length_mask

HEAD_WIDTH = 64
_ROTARY_BASE = 10_000
_LEVELS = 3  # values that one digit of a code takes
_TANH_SCALE = 0.9990000128746033  # float32(0.999): keeps the rounding inside the levels
_MASKED = -1e10


@dataclass(frozen=True, slots=True)
class SpeechTokenizerSizes:
    """Widths and depth; the defaults are the official model's."""

    width: int = 1280
    layers: int = 6
    inner: int = 5120  # of the feed-forward layers
    memory: int = 31  # frames that an FSMN memory block spans
    digits: int = 8
    attention_epsilon: float = 1e-5  # of the layer norms before attention
    feed_forward_epsilon: float = 1e-5  # of the layer norms before the feed-forward layers


class SpeechTokenizer(nn.Module):
    """Log-mel spectrogram [B, 128, T] -> speech tokens [B, ceil(T / 4)], 25 a second."""

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.encoder = _Encoder(sizes)
        self.quantizer = _Quantizer(sizes)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """`features` float32 [B, 128, T], `frames` int32 [B, 1] valid ones -> int32 tokens and their count.

        Tokens [B, ceil(T / 4)] are zero beyond the count [B, 1].
        """
        hidden, count = self.encoder(features, frames)
        tokens = self.quantizer(hidden) * length_mask(count, hidden.shape[1]).squeeze(1).to(torch.int32)
        return tokens, count


class _Encoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(WHISPER_BINS, sizes.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(sizes.width, sizes.width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        frequencies = 1 / _ROTARY_BASE ** (torch.arange(0, HEAD_WIDTH, 2).float() / HEAD_WIDTH)
        angles = torch.outer(torch.arange(PROMPT_TOKENS.max), frequencies).repeat(1, 2)  # [positions, 64]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 128, T] -> hidden states [B, ceil(T / 4), width] and their count int32 [B, 1]."""
        hidden = functional.gelu(self.conv1(features * length_mask(frames, features.shape[2])))
        count = (frames + 1) // 2
        hidden = functional.gelu(self.conv2(hidden * length_mask(count, hidden.shape[2])))
        count = (count + 1) // 2
        hidden = hidden.transpose(1, 2)  # [B, T', width]
        length = hidden.shape[1]
        mask = length_mask(count, length)  # [B, 1, T']
        rotary = (self.cos[:length], self.sin[:length])
        for block in self.blocks:
            hidden = block(hidden, mask, rotary)
        return hidden, count


class _Block(nn.Module):
    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.attn = _MemoryAttention(sizes)
        self.attn_ln = nn.LayerNorm(sizes.width, eps=sizes.attention_epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, sizes.inner), nn.GELU(), nn.Linear(sizes.inner, sizes.width)
        )
        self.mlp_ln = nn.LayerNorm(sizes.width, eps=sizes.feed_forward_epsilon)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attn(self.attn_ln(hidden), mask, rotary)
        updated: Tensor = hidden + self.mlp(self.mlp_ln(hidden))
        return updated


class _MemoryAttention(nn.Module):
    """Rotary self-attention plus a depth-wise convolution over the values (FSMN memory)."""

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.fsmn_block = nn.Conv1d(
            width, width, sizes.memory, padding=sizes.memory // 2, groups=width, bias=False
        )

    def forward(self, hidden: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        query = _rotated(_heads(self.query(hidden)), rotary) * HEAD_WIDTH**-0.25  # [B, H, T, 64]
        key = _rotated(_heads(self.key(hidden)), rotary) * HEAD_WIDTH**-0.25
        value = self.value(hidden)
        scores = query @ key.transpose(2, 3) + ((1 - mask) * _MASKED).unsqueeze(1)  # [B, H, T, T]
        mixed = (scores.softmax(dim=3) @ _heads(value)).transpose(1, 2).flatten(2)  # [B, T, width]
        attended: Tensor = self.out(mixed)
        return attended + self._memory(value.transpose(1, 2), mask)

    def _memory(self, value: Tensor, mask: Tensor) -> Tensor:
        value = value * mask  # [B, width, T]
        remembered: Tensor = (self.fsmn_block(value) + value) * mask
        return remembered.transpose(1, 2)


class _Quantizer(nn.Module):
    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self._codebook = _Codebook(sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> codes int32 [B, T]."""
        codes: Tensor = self._codebook(hidden)
        return codes


class _Codebook(nn.Module):
    """Finite scalar quantisation: each of the projected values becomes a ternary digit, lowest first."""

    powers: Tensor

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.project_down = nn.Linear(sizes.width, sizes.digits)
        powers = _LEVELS ** torch.arange(sizes.digits, dtype=torch.int32)
        self.register_buffer("powers", powers, persistent=False)

    def levels(self, hidden: Tensor) -> Tensor:
        """The values before they are rounded to -1, 0 or 1: [B, T, width] -> [B, T, digits]."""
        projected: Tensor = self.project_down(hidden)
        return projected.tanh() * _TANH_SCALE

    def forward(self, hidden: Tensor) -> Tensor:
        # Integer arithmetic: a code is beyond what half precision counts exactly.
        digits = self.levels(hidden).round().to(torch.int32) + _LEVELS // 2
        return (digits * self.powers).sum(dim=2, dtype=torch.int32)


def _heads(hidden: Tensor) -> Tensor:
    """[B, T, width] -> [B, heads, T, 64]."""
    batch, length, _ = hidden.shape
    return hidden.reshape(batch, length, -1, HEAD_WIDTH).transpose(1, 2)


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding over half-split pairs (RoFormer, arXiv 2104.09864)."""
    cos, sin = rotary
    low, high = heads.chunk(2, dim=3)
    return heads * cos + torch.cat([-high, low], dim=3) * sin
