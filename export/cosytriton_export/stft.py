"""Short-time Fourier transform and its inverse as convolutions with constant bases.

Graph compilers for GPUs refuse the DFT operator; a strided convolution with the windowed sines and
cosines computes the same, and a transposed one its inverse. Rows of a batch may have unequal lengths:
the reflected edge and the overlap-add envelope then follow each row's own end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def hann_window(size: int) -> Tensor:
    """Make the periodic Hann window, FP64 [size]."""
    return torch.hann_window(size, dtype=torch.float64)


def stft_basis(window: Tensor) -> Tensor:
    """Kernels of the forward transform, FP32 [2 * bins, 1, n_fft], with bins = n_fft // 2 + 1.

    The first `bins` rows give the real part, the others the imaginary part.
    """
    angle = _angles(len(window))
    return (torch.cat([angle.cos(), -angle.sin()]) * window.double()).float()[:, None]


def istft_basis(window: Tensor) -> Tensor:
    """Kernels of the inverse transform for `conv_transpose1d`, FP32 [2 * bins, 1, n_fft].

    Each frame becomes its inverse real DFT times the window; the sum still has to be divided by the
    summed squares of the windows.
    """
    n_fft = len(window)
    angle = _angles(n_fft)
    # A bin stands for itself and its mirror image, except the first and (even n_fft) the last.
    copies = torch.full((len(angle), 1), 2.0, dtype=torch.float64)
    copies[0] = 1
    if n_fft % 2 == 0:
        copies[-1] = 1
    basis = torch.cat([angle.cos() * copies, -angle.sin() * copies]) / n_fft
    return (basis * window.double()).float()[:, None]


def _angles(n_fft: int) -> Tensor:
    bins, samples = torch.arange(n_fft // 2 + 1), torch.arange(n_fft)
    # The product is reduced as an integer, which keeps the angles of high bins exact.
    return 2 * math.pi * (bins[:, None] * samples % n_fft).double() / n_fft


def length_mask(counts: Tensor, length: int) -> Tensor:
    """1 where a row has content: counts INT32 [B, 1] -> FP32 [B, 1, length]."""
    positions = torch.arange(length, device=counts.device)
    return (positions < counts).float().unsqueeze(1)


def reflect_pad(signal: Tensor, counts: Tensor, left: int, right: int) -> Tensor:
    """Reflect each row at its own ends: [B, N] -> [B, left + N + right].

    Row b holds `counts[b]` samples (INT32 [B, 1], more than `right`); what lies beyond its reflected
    end is arbitrary.
    """
    last = counts.long() - 1
    position = torch.arange(-left, signal.shape[1] + right, device=signal.device)
    index = last - (last - position.abs()).abs()  # [B, left + N + right]
    return signal.gather(1, index.clamp(min=0))


class Stft(nn.Module):
    """Centred transform with reflected edges, as `torch.stft(center=True, pad_mode="reflect")`."""

    def __init__(self, window: Tensor, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = len(window), hop
        self.basis: Tensor
        self.register_buffer("basis", stft_basis(window), persistent=False)

    def forward(self, signal: Tensor, counts: Tensor) -> Tensor:
        """FP32 [B, N] with counts INT32 [B, 1] -> real and imaginary parts FP32 [B, 2 * bins, N // hop + 1].

        Row b has `counts[b] // hop + 1` valid frames; the others are arbitrary.
        """
        padded = reflect_pad(signal, counts, self.n_fft // 2, self.n_fft // 2)
        return functional.conv1d(padded[:, None], self.basis, stride=self.hop)


class InverseStft(nn.Module):
    """Overlap-add of windowed frames, as `torch.istft(center=True)`."""

    def __init__(self, window: Tensor, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = len(window), hop
        self.basis: Tensor
        self.squares: Tensor
        self.register_buffer("basis", istft_basis(window), persistent=False)
        self.register_buffer("squares", window.float().square()[None, None], persistent=False)

    def forward(self, spectrum: Tensor, mask: Tensor) -> Tensor:
        """FP32 [B, 2 * bins, L] -> FP32 [B, (L - 1) * hop].

        `mask` FP32 [B, 1, L] is 1 at a row's valid frames, and the spectrum is zero elsewhere. Samples
        beyond `(valid - 1) * hop` are arbitrary.
        """
        trim = self.n_fft // 2
        signal = functional.conv_transpose1d(spectrum, self.basis, stride=self.hop, padding=trim)
        mask = mask.to(self.squares.dtype)
        envelope = functional.conv_transpose1d(mask, self.squares, stride=self.hop, padding=trim)
        return (signal / envelope.clamp(min=1e-8)).squeeze(1)
