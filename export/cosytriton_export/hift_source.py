"""The excitation of HiFT: pitch from the mel spectrogram, sines of its harmonics, fixed noise.

The neural source filter of CosyVoice 2 (arXiv 2412.10117; official: `ConvRNNF0Predictor`, `SineGen2`,
`SourceModuleHnNSF`) with two deliberate differences. The phase is kept in cycles and wrapped, so that a
long text keeps the precision that the official unwrapped float32 radians lose. The noise is a function
of the absolute sample position, so that a stream hears the noise of the one-shot call and a repeated
request gives the same samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.stft import length_mask

NOISE_LENGTH = 262_139
"""Entries of the noise table: the largest prime below 2^18, so the noise repeats after 10.9 s at 24 kHz."""

PHASE_STEPS = 2048
"""Whole steps of a cycle, summed exactly in float32 for 2^24 / 2048 = 8192 frames (164 s at 50 Hz)."""


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """Sizes of the excitation, named as in the checkpoint's yaml."""

    sample_rate: int  # Hz
    mel_hop: int  # samples per mel frame
    mel_bins: int
    pitch_channels: int
    harmonics: int  # sines, the fundamental included
    sine_amplitude: float
    noise_sigma: float  # standard deviation of the noise under voiced speech
    voiced_threshold: float  # Hz


def noise_table(length: int = NOISE_LENGTH, seed: int = 0) -> Tensor:
    """Draw the fixed standard normal table, FP32 [length]."""
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


class PitchPredictor(nn.Module):
    """Fundamental frequency by five convolutions over the mel spectrogram."""

    LAYERS = 5

    def __init__(self, mel_bins: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(self.LAYERS):
            layers += [nn.Conv1d(channels if i else mel_bins, channels, 3, padding=1), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, mask: Tensor) -> Tensor:
        """Masked mel FP32 [B, mel_bins, T], mask [B, 1, T] -> Hz FP32 [B, T], zero where masked."""
        for layer in self.condnet:
            mel = layer(mel) * mask
        pitch: Tensor = self.classifier(mel.transpose(1, 2)).squeeze(2)
        return pitch.abs() * mask.squeeze(1)


class HarmonicSource(nn.Module):
    """Sines of the harmonics and noise, mixed to one channel."""

    def __init__(self, config: SourceConfig, noise: Tensor) -> None:
        super().__init__()
        self.config = config
        self.l_linear = nn.Linear(config.harmonics, 1)
        self.noise: Tensor
        # The head once more behind the end: every position has `harmonics` successors.
        circular = torch.cat([noise, noise[: config.harmonics - 1]])
        self.register_buffer("noise", circular[None, None], persistent=False)

    def forward(self, pitch: Tensor, counts: Tensor, noise_offset: Tensor) -> Tensor:
        """Masked pitch in Hz FP32 [B, T] -> source FP32 [B, T * mel_hop], zero beyond the row's end.

        `counts` INT32 [B, 1] are mel frames; `noise_offset` INT32 [B, 1] is the absolute position of the
        row's first sample.
        """
        config = self.config
        voiced = (pitch > config.voiced_threshold).float()
        loudness = voiced * config.noise_sigma + (1 - voiced) * (config.sine_amplitude / 3)
        weight = self.l_linear.weight.unsqueeze(2)  # [1, harmonics, 1]
        sines = functional.conv1d(self.sines(pitch), weight).squeeze(1) * config.sine_amplitude
        mixed = sines * self._per_sample(voiced)
        mixed = mixed + self._mixed_noise(mixed.shape[1], noise_offset) * self._per_sample(loudness)
        source = torch.tanh(mixed + self.l_linear.bias)
        return source * length_mask(counts * config.mel_hop, source.shape[1]).squeeze(1)

    def sines(self, pitch: Tensor) -> Tensor:
        """Compute unit sines of every harmonic: Hz FP32 [B, T] -> FP32 [B, harmonics, T * mel_hop].

        The phase at a frame's centre is the sum of all frequencies up to it; between two centres it is
        linear, before the first and behind the last it stands still (official: linear up-sampling).
        """
        hop = self.config.mel_hop
        harmonic = torch.arange(1, self.config.harmonics + 1, device=pitch.device)[None, :, None]
        step = _fraction(pitch[:, None] * harmonic / self.config.sample_rate)  # cycles per sample [B, H, T]
        centre = _fraction(_phase(pitch * hop / self.config.sample_rate)[:, None] * harmonic)  # [B, H, T]

        # T + 1 spans: up to the first centre, between two centres, behind the last. A masked frame has
        # step 0, so the phase also stands still behind the last centre of a shorter row.
        start = torch.cat([centre[:, :, :1], centre], dim=2)
        still = torch.zeros_like(step[:, :, :1])
        step = torch.cat([still, step[:, :, 1:], still], dim=2)
        offset = torch.arange(hop, device=pitch.device) + 0.5
        cycles = start.unsqueeze(3) + step.unsqueeze(3) * offset  # [B, H, T + 1, hop]
        cycles = cycles.flatten(2)[:, :, hop // 2 : -(hop // 2)]
        return torch.sin(2 * math.pi * _fraction(cycles))

    def _mixed_noise(self, length: int, offset: Tensor) -> Tensor:
        """Noise of every harmonic, weighted and summed: offset INT32 [B, 1] -> FP32 [B, length].

        Harmonic h of sample t hears `table[((offset + t) * harmonics + h) % len(table)]`. The weighted
        sum over h depends on the first index only, so it is taken once over the table.
        """
        harmonics = self.config.harmonics
        size = self.noise.shape[2] - (harmonics - 1)
        mixed = functional.conv1d(self.noise, self.l_linear.weight.unsqueeze(0)).flatten()  # [size]
        position = torch.arange(length, device=offset.device) + offset.long() % size
        index = position * harmonics % size
        return mixed.index_select(0, index.flatten()).view_as(index)

    def _per_sample(self, frames: Tensor) -> Tensor:
        return frames.unsqueeze(2).expand(-1, -1, self.config.mel_hop).flatten(1)


def _fraction(cycles: Tensor) -> Tensor:
    return cycles - cycles.floor()


def _phase(steps: Tensor) -> Tensor:
    """Cumulative sum of FP32 [B, T] in cycles, modulo whole cycles and without a growing rounding error.

    The coarse part of each step is a multiple of 1 / PHASE_STEPS whose sum is exact; the sum of the fine
    parts stays small.
    """
    steps = _fraction(steps)
    coarse = (steps * PHASE_STEPS).round() / PHASE_STEPS
    return _fraction(coarse.cumsum(1)) + (steps - coarse).cumsum(1)
