"""The layers of the causal U-Net in the form that its graph has: channels last, products for convolutions.

They compute what those of `estimator` do, out of the same modules. Runtimes are fastest at products
with one constant matrix, and these quantize best; nothing is transposed on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from cosytriton_export.flow.estimator import (
    Attention,
    CausalBlock,
    ResnetBlock,
    Stage,
    TransformerBlock,
)
from cosytriton_export.flow.history import History
from cosytriton_export.flow.operators import attention, mish


def convolve(conv: nn.Conv1d, x: Tensor, history: History) -> Tensor:
    """Causal convolution [B, T, inputs] -> [B, T, outputs], as one product with each frame's window."""
    (kernel,), frames = conv.kernel_size, x.shape[1]
    weight = conv.weight.permute(2, 1, 0).flatten(0, 1)  # [kernel * inputs, outputs]
    if kernel > 1:
        window = torch.arange(frames, device=x.device)[:, None] + torch.arange(kernel, device=x.device)
        windows = history.padded(x, kernel - 1).index_select(1, window.flatten())  # [B, T * kernel, inputs]
        x = torch.unflatten(windows, 1, (frames, kernel)).flatten(2)
    product = x @ weight
    return product if conv.bias is None else product + conv.bias


def run_stage(stage: Stage, x: Tensor, time: Tensor, history: History) -> Tensor:
    """[B, T, inputs] -> [B, T, C]."""
    resnet, transformers = cast(ResnetBlock, stage[0]), cast(Iterable[TransformerBlock], stage[1])
    x = _resnet(resnet, x, time, history)
    for block in transformers:
        x = x + _attend(block.attn1, block.norm1(x), history)
        x = x + block.ff(block.norm3(x))
    return x


def _resnet(resnet: ResnetBlock, x: Tensor, time: Tensor, history: History) -> Tensor:
    hidden = run_block(resnet.block1, x, history) + resnet.mlp(time)[:, None]
    return run_block(resnet.block2, hidden, history) + convolve(resnet.res_conv, x, history)


def run_block(block: CausalBlock, x: Tensor, history: History) -> Tensor:
    """[B, T, inputs] -> [B, T, outputs]."""
    conv, norm = cast(nn.Conv1d, block.block[0]), block.block[2]
    return mish(norm(convolve(conv, x, history)))


def _attend(layer: Attention, x: Tensor, history: History) -> Tensor:
    seen = history.seen(x)
    mixed = attention(layer.to_q(x), layer.to_k(seen), layer.to_v(seen), history.bias, layer.heads)
    attended: Tensor = layer.to_out[0](mixed)
    return attended
