"""Masks of a batch whose rows have different lengths and modes.

Everything in the flow except attention and the lookahead convolution is causal, so what stands to the
right of a row's end cannot reach its valid part: it is enough to hide keys from attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e4
"""Added to the score of a hidden key: its softmax weight is exactly 0 in float32 and in float16."""


def length_mask(count: Tensor, extent: int) -> Tensor:
    """Mark the first `count` [B, 1] of `extent` positions; returns bool [B, extent]."""
    return torch.arange(extent, device=count.device) < count


def attention_bias(count: Tensor, streaming: Tensor, block: int, extent: int) -> Tensor:
    """Build the additive attention mask of each row; 0 is visible, `HIDDEN` is not.

    A streaming row sees all blocks up to the query's own, so that later tokens never change earlier mel
    (CosyVoice 2, arXiv 2412.10117, chunk-aware masks); any other row sees itself whole.

    Args:
        count: valid positions, int64 [B, 1].
        streaming: bool [B, 1].
        block: positions per block.
        extent: padded length T.

    The mask is float32 [B, 1, T, T], query by key.
    """
    position = torch.arange(extent, device=count.device)
    block_end = position - position % block + block
    visible = torch.where(streaming, torch.minimum(block_end, count), count)  # [B, T] keys per query
    hidden = position >= visible[:, None, :, None]
    return hidden.to(torch.float32) * HIDDEN
