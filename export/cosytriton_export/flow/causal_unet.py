"""The flow's velocity estimator of CosyVoice 2: a causal U-Net at one rate (arXiv 2412.10117)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from cosytriton_export.flow.channels_last import convolve, run_block, run_stage
from cosytriton_export.flow.estimator import (
    EXPANSION,
    CausalBlock,
    CausalConv,
    OuterStage,
    Stage,
    TimeEmbedding,
)
from cosytriton_export.flow.history import Beginning, History


class CausalConditionalDecoder(nn.Module):
    """Noisy mel, encoder output, speaker and prompt mel to the velocity of the flow.

    The official network knows several widths with a strided convolution between them; CosyVoice 2
    has one, so nothing changes the rate.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        channels: int,
        heads: int,
        head_width: int,
        blocks: int,
        mid_stages: int,
    ) -> None:
        super().__init__()
        sizes = (channels, heads, head_width, blocks)
        self.time_mlp = TimeEmbedding(inputs, EXPANSION * channels)
        self.down_blocks = nn.ModuleList([OuterStage(inputs, *sizes)])
        self.mid_blocks = nn.ModuleList(Stage(channels, *sizes) for _ in range(mid_stages))
        self.up_blocks = nn.ModuleList([OuterStage(2 * channels, *sizes)])
        self.final_block = CausalBlock(channels, channels)
        self.final_proj = nn.Conv1d(channels, outputs, 1)

    def embed_time(self, time: Tensor) -> Tensor:
        """Embed times [K] in 0..1; returns [K, time width]."""
        embedded: Tensor = self.time_mlp(time)
        return embedded

    def forward(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """Estimate the velocity.

        Args:
            x: noisy mel, encoder output, speaker and prompt mel along the channels, [B, inputs, T].
            time: one embedded time [1, time width].
            bias: additive attention mask [B, 1, T, T].

        The velocity is [B, outputs, T].
        """
        if torch.compiler.is_exporting():
            return self.estimate(x.mT, time, Beginning(bias)).mT
        down, up = cast(OuterStage, self.down_blocks[0]), cast(OuterStage, self.up_blocks[0])
        skip = down(x, time, bias)
        x = down.convolve(skip)
        for mid in self.mid_blocks:
            x = mid(x, time, bias)
        x = up.convolve(up(torch.cat((x, skip), dim=1), time, bias))
        velocity: Tensor = self.final_proj(self.final_block(x))
        return velocity

    def estimate(self, x: Tensor, time: Tensor, history: History) -> Tensor:
        """Compute the same with channels last and behind a history: [B, T, inputs] -> [B, T, outputs]."""
        down, up = cast(OuterStage, self.down_blocks[0]), cast(OuterStage, self.up_blocks[0])
        skip = run_stage(down, x, time, history)
        x = convolve(cast(CausalConv, down[2]), skip, history)
        for mid in cast(Iterable[Stage], self.mid_blocks):
            x = run_stage(mid, x, time, history)
        x = run_stage(up, torch.cat((x, skip), dim=2), time, history)
        x = convolve(cast(CausalConv, up[2]), x, history)
        return convolve(self.final_proj, run_block(self.final_block, x, history), history)
