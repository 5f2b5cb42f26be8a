"""Group normalisation of rows that end before the padded length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPSILON = 1e-5  # torch's default


class MaskedGroupNorm(nn.Module):
    """Group Normalization, arXiv 1803.08494, whose statistics see the valid frames of a row alone.

    Over a padded row `nn.GroupNorm` would count the padding too, and the row would depend on its batch.
    """

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.groups, self.group_channels = groups, channels // groups
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalise: x [B, C, T], mask [B, 1, T] of ones and zeros -> [B, C, T], the bias beyond the end."""
        grouped, inside = torch.unflatten(x, 1, (self.groups, self.group_channels)), mask[:, None]
        entries = inside.sum(dim=3, keepdim=True).clamp(min=1) * self.group_channels  # [B, 1, 1, 1]
        mean = (grouped * inside).sum(dim=(2, 3), keepdim=True) / entries
        centred = (grouped - mean) * inside
        variance = centred.square().sum(dim=(2, 3), keepdim=True) / entries
        normal = (centred * torch.rsqrt(variance + EPSILON)).flatten(1, 2)
        scaled: Tensor = normal * self.weight[:, None] + self.bias[:, None]
        return scaled
