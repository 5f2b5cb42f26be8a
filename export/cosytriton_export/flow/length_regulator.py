"""From the rate of the speech tokens to that of the mel: interpolation in pieces, then convolutions.

CosyVoice, arXiv 2407.05407; the pieces are those of the official class InterpolateRegulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.flow.group_norm import MaskedGroupNorm

EDGE_TOKENS = COSYVOICE1.lookahead  # that two chunks of a stream share; each end of a long row
EDGE_FRAMES = COSYVOICE1.fade_frames
KERNEL = 3


def frame_counts(tokens: Tensor) -> Tensor:
    """Mel frames of each number of speech tokens; int64 of any shape."""
    frames: Callable[[Any], Any] = COSYVOICE1.frames  # integer arithmetic, so element by element too
    counts: Tensor = frames(tokens)
    return counts


def interpolate_rows(
    x: Tensor, prompt_tokens: Tensor, prompt_frames: Tensor, tokens: Tensor, extent: int
) -> Tensor:
    """Stretch the reference and the sentence of each row to mel frames, each for itself.

    A sentence of more than two edges is stretched in three pieces, so that the tokens that two chunks of
    a stream share get the same frames in both.

    Args:
        x: tokens of the reference, then those of the sentence, [B, S, M].
        prompt_tokens: of the reference, int64 [B, 1].
        prompt_frames: the frames that they are stretched to, int64 [B, 1].
        tokens: of the sentence, int64 [B, 1].
        extent: padded frames T.

    The frames are [B, T, M] and meaningless beyond a row's end.
    """
    frames = frame_counts(tokens)
    is_long = tokens > 2 * EDGE_TOKENS
    token_bounds = _piece_bounds(prompt_tokens, tokens, torch.where(is_long, EDGE_TOKENS, tokens), is_long)
    frame_bounds = _piece_bounds(prompt_frames, frames, torch.where(is_long, EDGE_FRAMES, frames), is_long)
    position = torch.arange(extent, device=x.device).expand(x.shape[0], -1)
    piece = (position[..., None] >= frame_bounds[:, None, 1:-1]).sum(dim=2)  # [B, T]

    first_token, first_frame = token_bounds.gather(1, piece), frame_bounds.gather(1, piece)
    inputs = token_bounds.gather(1, piece + 1) - first_token
    outputs = frame_bounds.gather(1, piece + 1) - first_frame
    return _interpolate(x, position - first_frame, outputs, first_token, inputs)


def _piece_bounds(prompt: Tensor, count: Tensor, head: Tensor, is_long: Tensor) -> Tensor:
    """Where reference, head, middle and tail begin, and the row's end; [B, 5]. A short row is all head."""
    tail = torch.where(is_long, head, 0)
    bounds = (torch.zeros_like(prompt), prompt, prompt + head, prompt + count - tail, prompt + count)
    return torch.cat(bounds, dim=1)


def _interpolate(x: Tensor, frame: Tensor, frames: Tensor, first: Tensor, tokens: Tensor) -> Tensor:
    """Interpolate linearly in pieces of x [B, S, M], rounded as `F.interpolate(align_corners=False)` does.

    All int64 [B, T], for each frame: its position in its piece, the piece's frames, first token and tokens.
    Returns [B, T, M].
    """
    scale = tokens.to(torch.float32) / frames.clamp(min=1).to(torch.float32)
    source = ((frame.to(torch.float32) + 0.5) * scale - 0.5).clamp(min=0)
    last = (tokens - 1).clamp(min=0)
    left = torch.minimum(source.long(), last)
    right = torch.minimum(left + 1, last)
    weight = (source - left.to(torch.float32)).clamp(max=1)[..., None]
    return (1 - weight) * _rows(x, first + left) + weight * _rows(x, first + right)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, T] of x [B, S, M]; returns [B, T, M]."""
    inside = index.clamp(max=x.shape[1] - 1)
    return x.gather(1, inside[..., None].expand(-1, -1, x.shape[2]))


class InterpolateRegulator(nn.Module):
    """Interpolated tokens, smoothed by convolutions over reference and sentence together."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        # The index of each part is part of the official key names.
        parts: list[nn.Module] = []
        for _ in range(layers):
            conv = nn.Conv1d(channels, channels, KERNEL, padding=1)
            parts += [conv, MaskedGroupNorm(1, channels), nn.Mish()]
        self.model = nn.ModuleList([*parts, nn.Conv1d(channels, channels, 1)])

    def forward(
        self, x: Tensor, prompt_tokens: Tensor, prompt_frames: Tensor, tokens: Tensor, mask: Tensor
    ) -> Tensor:
        """Regulate; as `interpolate_rows`, with the valid frames as mask [B, 1, T] -> [B, M, T]."""
        frames = interpolate_rows(x, prompt_tokens, prompt_frames, tokens, mask.shape[2]).transpose(1, 2)
        for conv, norm, mish in zip(self.model[:-1:3], self.model[1::3], self.model[2::3], strict=True):
            frames = mish(norm(conv(frames * mask), mask))
        out: Tensor = self.model[-1](frames)
        return out
