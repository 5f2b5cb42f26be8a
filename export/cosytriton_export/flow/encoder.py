"""The flow's encoder: a conformer without convolution modules that doubles the frame rate half way.

CosyVoice 2, arXiv 2412.10117; attention with relative positions after Transformer-XL, arXiv 1901.02860.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_export.flow.masks import attention_bias, length_mask

LAYER_NORM_EPS = 1e-12  # inside the layers; the other norms keep torch's default


def relative_positions(extent: int, width: int, device: torch.device) -> Tensor:
    """Sinusoids of the distances extent-1 .. -(extent-1), query minus key; returns [2*extent-1, width]."""
    distance = torch.arange(extent - 1, -extent, -1, device=device, dtype=torch.float32)
    octave = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    angle = distance[:, None] * torch.exp(octave * (-math.log(10_000) / width))
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)  # sine and cosine alternate


def relative_shift(scores: Tensor) -> Tensor:
    """Realign [B, H, T, 2T-1] from query by distance to query by key [B, H, T, T].

    Row i must start i columns earlier than the row before it; one padded column and a reshape do that
    for all rows at once.
    """
    batch, heads, queries, distances = scores.shape
    padded = F.pad(scores, (1, 0)).reshape(batch, heads, distances + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, distances)[..., :queries]


class RelativeAttention(nn.Module):
    """Self-attention whose scores add a content term and a distance term."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.linear_q = nn.Linear(width, width)
        self.linear_k = nn.Linear(width, width)
        self.linear_v = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, self.head_width))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, self.head_width))

    def forward(self, x: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Attend: x [B, T, D], positions [2T-1, D], bias [B, 1, T, T] -> [B, T, D]."""
        query = self.linear_q(x).unflatten(-1, (self.heads, self.head_width))  # [B, T, H, D/H]
        key = (
            self.linear_k(x).unflatten(-1, (self.heads, self.head_width)).permute(0, 2, 3, 1)
        )  # [B, H, D/H, T]
        value = (
            self.linear_v(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
        )  # [B, H, T, D/H]
        distance = self.linear_pos(positions).unflatten(-1, (self.heads, self.head_width)).permute(1, 2, 0)
        content_scores = (query + self.pos_bias_u).transpose(1, 2) @ key  # [B, H, T, T]
        distance_scores = relative_shift((query + self.pos_bias_v).transpose(1, 2) @ distance)
        scores = (content_scores + distance_scores) / math.sqrt(self.head_width)
        mixed = torch.softmax(scores + bias, dim=-1) @ value
        attended: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, hidden)
        self.w_2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        out: Tensor = self.w_2(F.silu(self.w_1(x)))
        return out


class ConformerLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(width, heads)
        self.feed_forward = FeedForward(width, hidden)
        self.norm_ff = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.norm_mha = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        attended: Tensor = x + self.self_attn(self.norm_mha(x), positions, bias)
        out: Tensor = attended + self.feed_forward(self.norm_ff(attended))
        return out


class Embedding(nn.Module):
    """Linear layer and norm before a stack of layers."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, inputs] -> [B, T, D], scaled as the sinusoidal positions want it."""
        embedded: Tensor = self.out(x) * self.scale
        return embedded


class PreLookahead(nn.Module):
    """Lets each token hear the next `lookahead` ones, through `hidden` channels."""

    def __init__(self, width: int, hidden: int, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.conv1 = nn.Conv1d(width, hidden, lookahead + 1)
        self.conv2 = nn.Conv1d(hidden, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; positions beyond a row's end must be zero."""
        hidden = F.leaky_relu(self.conv1(F.pad(x.transpose(1, 2), (0, self.lookahead))))
        heard: Tensor = self.conv2(F.pad(hidden, (2, 0)))
        return x + heard.transpose(1, 2)


class Upsample(nn.Module):
    """Repeats each token `stride` times and smooths with a causal convolution."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv1d(width, width, 2 * stride + 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T * stride, D]."""
        frames = x.repeat_interleave(self.stride, dim=1).transpose(1, 2)
        smooth: Tensor = self.conv(F.pad(frames, (2 * self.stride, 0)))
        return smooth.transpose(1, 2)


class UpsampleConformerEncoder(nn.Module):
    """Token embeddings to hidden mel frames."""

    def __init__(
        self,
        inputs: int,
        width: int,
        heads: int,
        hidden: int,
        layers: int,
        up_layers: int,
        lookahead: int,
        stride: int,
        block: int,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.block = block  # tokens per block of the streaming mask
        self.embed = Embedding(inputs, width)
        self.pre_lookahead_layer = PreLookahead(width, width, lookahead)
        self.encoders = nn.ModuleList(ConformerLayer(width, heads, hidden) for _ in range(layers))
        self.up_layer = Upsample(width, stride)
        self.up_embed = Embedding(width, width)
        self.up_encoders = nn.ModuleList(ConformerLayer(width, heads, hidden) for _ in range(up_layers))
        self.after_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, given: Tensor, count: Tensor, streaming: Tensor) -> Tensor:
        """Encode.

        Args:
            x: embedded tokens [B, S, inputs].
            given: tokens of each row, int64 [B, 1].
            count: tokens that get frames, int64 [B, 1]; those between `count` and `given` are only heard
                as lookahead of the ones before them.
            streaming: whether the row has the block mask, bool [B, 1].

        The frames are [B, S * stride, D] and meaningless beyond `count * stride`.
        """
        # Zero beyond the end is the padding that the lookahead of a complete sentence expects.
        x = self.embed(x) * length_mask(given, x.shape[1])[..., None]
        x = self.pre_lookahead_layer(x)
        x = self._stack(self.encoders, x, count, streaming, self.block)
        x = self.up_embed(self.up_layer(x))
        x = self._stack(self.up_encoders, x, count * self.stride, streaming, self.block * self.stride)
        out: Tensor = self.after_norm(x)
        return out

    def _stack(
        self, layers: nn.ModuleList, x: Tensor, count: Tensor, streaming: Tensor, block: int
    ) -> Tensor:
        positions = relative_positions(x.shape[1], x.shape[2], x.device)
        bias = attention_bias(count, streaming, block, x.shape[1])
        for layer in layers:
            x = layer(x, positions, bias)
        return x
