"""The S3 speech tokenizers of CosyVoice 1, 2 and 3, for batches of recordings with unequal lengths.

All are encoders in the way of Whisper (arXiv 2212.04356) followed by a quantiser. Version 1, "CosyVoice: A
Scalable Multilingual Zero-shot Text-to-speech Synthesizer based on Supervised Semantic Tokens" (arXiv
2407.05407), adds sinusoidal positions and takes the nearest codeword of a codebook. Version 2, "CosyVoice 2:
Scalable Streaming Speech Synthesis with Large Language Models" (arXiv 2412.10117), has rotary positions, FSMN
memory blocks (arXiv 1803.05030) and finite scalar quantisation ("FSQ", arXiv 2309.15505). Version 3 is
version 2 with more blocks. Attribute names are those of the published PyTorch weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_ensemble.pipeline import MAX_REFERENCE_SECONDS
from cosytriton_export.features import FEATURE_RATE, WHISPER_BINS
from cosytriton_export.stft import length_mask

Version = Literal[1, 2, 3]

HEAD_WIDTH = 64
MAX_FRAMES = MAX_REFERENCE_SECONDS * FEATURE_RATE
STRIDES: dict[Version, tuple[int, int]] = {1: (1, 2), 2: (2, 2), 3: (2, 2)}
"""Of the two convolutions at the start: 50 tokens a second, or 25."""

_FREQUENCY_BASE = 10_000  # ratio of the fastest to the slowest position frequency
_LEVELS = 3  # values that one digit of a scalar-quantised code takes
_TANH_SCALE = 0.9990000128746033  # float32(0.999): keeps the rounding inside the levels
_MASKED = -1e10


@dataclass(frozen=True, slots=True)
class SpeechTokenizerSizes:
    """Version, widths and depth; the defaults are those of the official version 2."""

    version: Version = 2
    width: int = 1280
    layers: int = 6  # the official version 3 has 12
    inner: int = 5120  # of the feed-forward layers
    head_width: int = HEAD_WIDTH
    attention_epsilon: float = 1e-5  # of the layer norms before attention
    feed_forward_epsilon: float = 1e-5  # of the layer norms before the feed-forward layers
    positions: int = MAX_FRAMES // 2  # version 1: tokens that the added positions reach
    codewords: int = 4096  # version 1
    memory: int = 31  # versions 2 and 3: frames that an FSMN memory block spans
    digits: int = 8  # versions 2 and 3

    @property
    def frames_per_token(self) -> int:
        """Log-mel frames of one token."""
        return math.prod(STRIDES[self.version])


class SpeechTokenizer(nn.Module):
    """Log-mel spectrogram [B, 128, T] -> speech tokens [B, ceil(T / 4)], in version 1 [B, ceil(T / 2)]."""

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.encoder = _Encoder(sizes)
        self.quantizer = _Quantizer(sizes)

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """`features` float32 [B, 128, T], `frames` int32 [B, 1] valid ones -> int32 tokens and their count.

        Tokens [B, ceil(T / frames_per_token)] are zero beyond the count [B, 1].
        """
        hidden, count = self.encoder(features, frames)
        tokens = self.quantizer(hidden) * length_mask(count, hidden.shape[1]).squeeze(1).to(torch.int32)
        return tokens, count


class _Encoder(nn.Module):
    cos: Tensor
    sin: Tensor
    positional_embedding: Tensor

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        first, second = STRIDES[sizes.version]
        self.conv1 = nn.Conv1d(WHISPER_BINS, sizes.width, 3, stride=first, padding=1)
        self.conv2 = nn.Conv1d(sizes.width, sizes.width, 3, stride=second, padding=1)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self._strides, self._rotary = (first, second), sizes.version > 1
        if self._rotary:
            angles = _angles(
                MAX_FRAMES // sizes.frames_per_token, sizes.head_width // 2, sizes.head_width / 2
            )
            angles = angles.repeat(1, 2)  # [positions, head width]
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        else:
            angles = _angles(sizes.positions, sizes.width // 2, sizes.width / 2 - 1)
            self.register_buffer("positional_embedding", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 128, T] -> hidden states [B, ceil(T / frames_per_token), width] and count int32 [B, 1]."""
        hidden, count = features, frames
        for conv, stride in zip((self.conv1, self.conv2), self._strides, strict=True):
            hidden = functional.gelu(conv(hidden * length_mask(count, hidden.shape[2])))
            count = (count + stride - 1) // stride
        hidden = hidden.transpose(1, 2)  # [B, T', width]
        length = hidden.shape[1]
        mask = length_mask(count, length)  # [B, 1, T']
        rotary = None
        if self._rotary:
            rotary = (self.cos[:length], self.sin[:length])
        else:
            hidden = hidden + self.positional_embedding[:length]
        for block in self.blocks:
            hidden = block(hidden, mask, rotary)
        return hidden, count


class _Block(nn.Module):
    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.attn = _Attention(sizes) if sizes.version == 1 else _MemoryAttention(sizes)
        self.attn_ln = nn.LayerNorm(sizes.width, eps=sizes.attention_epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, sizes.inner), nn.GELU(), nn.Linear(sizes.inner, sizes.width)
        )
        self.mlp_ln = nn.LayerNorm(sizes.width, eps=sizes.feed_forward_epsilon)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        hidden = hidden + self.attn(self.attn_ln(hidden), mask, rotary)
        updated: Tensor = hidden + self.mlp(self.mlp_ln(hidden))
        return updated


class _Attention(nn.Module):
    """Self-attention among a row's valid positions, rotary where there is a table."""

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self._head_width = sizes.head_width

    def forward(self, hidden: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        return self._attended(hidden, self.value(hidden), mask, rotary)

    def _attended(
        self, hidden: Tensor, value: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        query, key = self._heads(self.query(hidden)), self._heads(self.key(hidden))  # [B, H, T, head width]
        if rotary is not None:
            query, key = _rotated(query, rotary), _rotated(key, rotary)
        scale = self._head_width**-0.25  # on both factors
        scores = (query * scale) @ (key * scale).transpose(2, 3)  # [B, H, T, T]
        shares = (scores + ((1 - mask) * _MASKED).unsqueeze(1)).softmax(dim=3)
        attended: Tensor = self.out((shares @ self._heads(value)).transpose(1, 2).flatten(2))
        return attended

    def _heads(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> [B, heads, T, head width]."""
        batch, length, _ = hidden.shape
        return hidden.reshape(batch, length, -1, self._head_width).transpose(1, 2)


class _MemoryAttention(_Attention):
    """Self-attention plus a depth-wise convolution over the values (FSMN memory)."""

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__(sizes)
        self.fsmn_block = nn.Conv1d(
            sizes.width, sizes.width, sizes.memory, padding=sizes.memory // 2, groups=sizes.width, bias=False
        )

    def forward(self, hidden: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        value = self.value(hidden)
        return self._attended(hidden, value, mask, rotary) + self._memory(value.transpose(1, 2), mask)

    def _memory(self, value: Tensor, mask: Tensor) -> Tensor:
        value = value * mask  # [B, width, T]
        remembered: Tensor = (self.fsmn_block(value) + value) * mask
        return remembered.transpose(1, 2)


class _Quantizer(nn.Module):
    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self._codebook: _NearestCodeword | _ScalarQuantisation
        self._codebook = _NearestCodeword(sizes) if sizes.version == 1 else _ScalarQuantisation(sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> codes int32 [B, T]."""
        codes: Tensor = self._codebook(hidden)
        return codes

    def margin(self, hidden: Tensor) -> Tensor:
        """How far each code is from being another one: [B, T, width] -> [B, T], at least 0."""
        return self._codebook.margin(hidden)


class _NearestCodeword(nn.Module):
    """Vector quantisation: the codeword next to the normalised hidden state, the lowest of equal ones."""

    embed: Tensor

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(sizes.codewords, sizes.width))

    def _closeness(self, hidden: Tensor) -> Tensor:
        """The negative squared distances, but for a constant: [B, T, width] -> [B, T, codewords]."""
        direction = functional.normalize(hidden, dim=2)
        return 2 * direction @ self.embed.T - self.embed.square().sum(dim=1)

    def margin(self, hidden: Tensor) -> Tensor:
        """How much farther (squared) the second nearest codeword is."""
        nearest, second = self._closeness(hidden).topk(2, dim=2).values.unbind(dim=2)
        return nearest - second

    def forward(self, hidden: Tensor) -> Tensor:
        return self._closeness(hidden).argmax(dim=2).to(torch.int32)


class _ScalarQuantisation(nn.Module):
    """Finite scalar quantisation: each of the projected values becomes a ternary digit, lowest first."""

    powers: Tensor

    def __init__(self, sizes: SpeechTokenizerSizes) -> None:
        super().__init__()
        self.project_down = nn.Linear(sizes.width, sizes.digits)
        powers = _LEVELS ** torch.arange(sizes.digits, dtype=torch.int32)
        self.register_buffer("powers", powers, persistent=False)

    def _levels(self, hidden: Tensor) -> Tensor:
        """The values before they are rounded to -1, 0 or 1: [B, T, width] -> [B, T, digits]."""
        projected: Tensor = self.project_down(hidden)
        return projected.tanh() * _TANH_SCALE

    def margin(self, hidden: Tensor) -> Tensor:
        """How far the digit next to a rounding border is from it."""
        return (self._levels(hidden).abs() - 0.5).abs().amin(dim=2)

    def forward(self, hidden: Tensor) -> Tensor:
        # Integer arithmetic: a code is beyond what half precision counts exactly.
        digits = self._levels(hidden).round().to(torch.int32) + _LEVELS // 2
        return (digits * self.powers).sum(dim=2, dtype=torch.int32)


def _angles(positions: int, count: int, steps: float) -> Tensor:
    """Each position times `count` frequencies, of which `steps` span the base: [positions, count]."""
    frequencies = 1 / _FREQUENCY_BASE ** (torch.arange(count).float() / steps)
    return torch.outer(torch.arange(positions), frequencies)


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding over half-split pairs (RoFormer, arXiv 2104.09864)."""
    cos, sin = rotary
    low, high = heads.chunk(2, dim=3)
    return heads * cos + torch.cat([-high, low], dim=3) * sin
