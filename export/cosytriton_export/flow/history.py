"""What frames see of those before them: nothing, or what was kept of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class History(Protocol):
    """What the frames at hand see besides themselves; asked once by every layer, in their order."""

    bias: Tensor
    """Additive attention mask [B, 1, T, past + T]."""

    def padded(self, x: Tensor, frames: int) -> Tensor:
        """Put the last `frames` that a convolution read before x [B, T, C] in front: [B, frames + T, C]."""

    def seen(self, x: Tensor) -> Tensor:
        """Put all that an attention read before x [B, T, C] in front: [B, past + T, C]."""


class Beginning:
    """Nothing: the first frame is at hand."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def padded(self, x: Tensor, frames: int) -> Tensor:
        """Zeros in front, as causal convolutions pad."""
        return torch.cat((x.new_zeros(x.shape[0], frames, x.shape[2]), x), dim=1)

    def seen(self, x: Tensor) -> Tensor:
        """Nothing in front."""
        return x


class Resumed:
    """The state of a stream in one Euler step; collects that of the frames at hand.

    Args:
        bias: additive attention mask [1, 1, T, past + T].
        attention: what each layer read, [past, B, C].
        convolution: the last frames that each convolution read, flattened, [B, frames * C].

    """

    def __init__(self, bias: Tensor, attention: Iterable[Tensor], convolution: Iterable[Tensor]) -> None:
        self.bias = bias
        self.attention: list[Tensor] = []  # of the frames at hand, [B, T, C]
        self._past, self._read = iter(attention), iter(convolution)
        self._last: list[Tensor] = []

    def padded(self, x: Tensor, frames: int) -> Tensor:
        """The convolution's last frames in front."""
        joined = torch.cat((torch.unflatten(next(self._read), 1, (frames, -1)), x), dim=1)
        # Not a slice: the tracer would carry its clipped bounds through every layer behind it.
        last = torch.arange(frames, device=x.device) + x.shape[1]
        self._last.append(joined.index_select(1, last).flatten(1))
        return joined

    def seen(self, x: Tensor) -> Tensor:
        """The attention's past in front."""
        self.attention.append(x)
        return torch.cat((next(self._past).transpose(0, 1), x), dim=1)

    @property
    def convolution(self) -> Tensor:
        """The last frames that each convolution read, side by side, [B, S]."""
        return torch.cat(self._last, dim=1)
