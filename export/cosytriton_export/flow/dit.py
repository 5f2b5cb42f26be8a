"""The flow's velocity estimator of Fun-CosyVoice3: a diffusion transformer.

DiT, arXiv 2212.09748, with the input and position embeddings of F5-TTS, arXiv 2410.06885; official class
`cosyvoice.flow.DiT.dit.DiT`.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_export.flow.estimator import time_sinusoids
from cosytriton_export.flow.history import Beginning, History
from cosytriton_export.flow.operators import Mish, attention

TIME_SINUSOIDS = 256
POSITION_KERNEL = 31  # frames of each convolution of the position embedding
POSITION_GROUPS = 16
NORM_EPS = 1e-6
ROTARY_BASE = 10_000


class TimeEmbedding(nn.Module):
    """Two linear layers over the sinusoids of the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(TIME_SINUSOIDS, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        """Times [K] in 0..1 to [K, D]."""
        embedded: Tensor = self.time_mlp(time_sinusoids(time, TIME_SINUSOIDS))
        return embedded


class PositionEmbedding(nn.Module):
    """Two grouped convolutions that see the present and the past."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = self._block(width)
        self.conv2 = self._block(width)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(width, width, POSITION_KERNEL, groups=POSITION_GROUPS), Mish())

    def forward(self, x: Tensor, history: History) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for block in (self.conv1, self.conv2):
            x = block(history.padded(x, POSITION_KERNEL - 1).mT).mT
        return x


class InputEmbedding(nn.Module):
    """State and conditions of a frame to the transformer's width, with the position embedding added."""

    def __init__(self, mel_bins: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(4 * mel_bins, width)
        self.conv_pos_embed = PositionEmbedding(width)

    def forward(self, x: Tensor, history: History) -> Tensor:
        """[B, T, 4M] of state, mu, speaker and prompt -> [B, T, D]."""
        state, mu, speaker, prompt = x.chunk(4, dim=2)
        joined = torch.cat((state, prompt, mu, speaker), dim=2)  # the order of the trained projection
        projected: Tensor = self.proj(joined)
        embedded: Tensor = projected + self.conv_pos_embed(projected, history)
        return embedded


class RotaryEmbedding(nn.Module):
    """Sine and cosine of the rotary positions, RoFormer, arXiv 2104.09864."""

    inv_freq: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        exponent = torch.arange(0, width, 2) / width
        self.register_buffer("inv_freq", ROTARY_BASE**-exponent)

    def forward(self, extent: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the first `extent` positions, both [extent, width / 2]."""
        position = torch.arange(extent, device=self.inv_freq.device, dtype=torch.float32)
        angle = position[:, None] * self.inv_freq
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of the first channels of x [B, T, D]; cosine and sine are [T, R / 2].

    Of a longer table the last rows count: x is the end of what it belongs to.

    Only R channels have a position, the others pass. The trained models have it so: their table is as wide
    as one head and meets the queries and keys before these are split, so that the first head alone rotates.

    The rotated channels come out sorted, the first ones of all pairs before the second ones. Scores do not
    depend on the order, if queries and keys have the same.
    """
    width, extent = 2 * cosine.shape[1], x.shape[1]
    cosine, sine = cosine[-extent:], sine[-extent:]
    even, odd = x[..., :width:2], x[..., 1:width:2]
    return torch.cat((even * cosine - odd * sine, odd * cosine + even * sine, x[..., width:]), dim=-1)


class RotaryAttention(nn.Module):
    """Multi-head self-attention whose first head knows the distance of query and key."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * head_width)
        self.to_k = nn.Linear(width, heads * head_width)
        self.to_v = nn.Linear(width, heads * head_width)
        self.to_out = nn.ModuleList([nn.Linear(heads * head_width, width)])

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], history: History) -> Tensor:
        """Attend: x [B, T, D], cosine and sine [past + T, D/H/2] -> [B, T, D]."""
        seen = history.seen(x)
        query, key = rotate(self.to_q(x), *rotary), rotate(self.to_k(seen), *rotary)
        attended: Tensor = self.to_out[0](attention(query, key, self.to_v(seen), history.bias, self.heads))
        return attended


class FeedForward(nn.Module):
    """Two linear layers with GELU, in its tanh form, between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        # The index of each part is part of the official key names; dropout stands between the two.
        first = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(first, nn.Identity(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        out: Tensor = self.ff(x)
        return out


class AdaptiveNorm(nn.Module):
    """Layer norm whose scale and shift, and what else depends on the time alone, come from the time."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, parts * width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)

    def modulation(self, time: Tensor) -> Tensor:
        """Embedded times [K, D] to [K, parts * D]."""
        parts: Tensor = self.linear(F.silu(time))
        return parts

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Normalise x [B, T, D] with shift and scale [1, D]."""
        normed: Tensor = self.norm(x) * (1 + scale) + shift
        return normed


class DiTBlock(nn.Module):
    """Attention and feed-forward, each with an adaptive norm before and a gate after it (adaLN-Zero)."""

    PARTS = 6

    def __init__(self, width: int, heads: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.attn_norm = AdaptiveNorm(width, self.PARTS)
        self.attn = RotaryAttention(width, heads, head_width)
        self.ff = FeedForward(width, hidden)

    def forward(
        self, x: Tensor, modulation: Tensor, rotary: tuple[Tensor, Tensor], history: History
    ) -> Tensor:
        """Input x [B, T, D] and modulation [1, 6D] -> [B, T, D]."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.chunk(self.PARTS, dim=1)
        x = x + gate * self.attn(self.attn_norm(x, shift, scale), rotary, history)
        # The second norm has no weights of its own: the first one's does for both.
        out: Tensor = x + ff_gate * self.ff(self.attn_norm(x, ff_shift, ff_scale))
        return out


class DiT(nn.Module):
    """Noisy mel, repeated tokens, speaker and prompt mel to the velocity of the flow."""

    def __init__(
        self, mel_bins: int, outputs: int, width: int, depth: int, heads: int, head_width: int, ff_mult: int
    ) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.input_embed = InputEmbedding(mel_bins, width)
        self.rotary_embed = RotaryEmbedding(head_width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(width, heads, head_width, ff_mult * width) for _ in range(depth)
        )
        self.norm_out = AdaptiveNorm(width, 2)
        self.proj_out = nn.Linear(width, outputs)

    def embed_time(self, time: Tensor) -> Tensor:
        """Times [K] in 0..1 to the modulations of all blocks and of the last norm, [K, (6 * depth + 2) * D].

        They depend on the time alone, so the layers that compute them (four tenths of the weights) are not
        needed in every step.
        """
        embedded = self.time_embed(time)
        norms = [*(cast(DiTBlock, block).attn_norm for block in self.transformer_blocks), self.norm_out]
        return torch.cat([norm.modulation(embedded) for norm in norms], dim=1)

    def forward(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """Estimate the velocity.

        Args:
            x: noisy mel, repeated tokens, speaker and prompt mel along the channels, [B, 4M, T].
            time: the modulations of one time, [1, (6 * depth + 2) * D].
            bias: additive attention mask [B, 1, T, T].

        The velocity is [B, outputs, T].
        """
        return self.estimate(x.mT, time, Beginning(bias)).mT

    def estimate(self, x: Tensor, time: Tensor, history: History) -> Tensor:
        """Compute the same with channels last and behind a history: [B, T, 4M] -> [B, T, outputs]."""
        width = self.proj_out.in_features
        depth = len(self.transformer_blocks)
        *modulations, last = time.split_with_sizes([DiTBlock.PARTS * width] * depth + [2 * width], dim=1)
        rotary = self.rotary_embed(history.bias.shape[3])
        x = self.input_embed(x, history)
        for block, modulation in zip(self.transformer_blocks, modulations, strict=True):
            x = block(x, modulation, rotary, history)
        scale, shift = last.chunk(2, dim=1)  # scale first, unlike in the blocks
        velocity: Tensor = self.proj_out(self.norm_out(x, shift, scale))
        return velocity
