"""The excitation of HiFT: pitch from the mel spectrogram, sines of its harmonics, fixed noise.

The neural source filter of CosyVoice (arXiv 2407.05407, 2412.10117; official: `ConvRNNF0Predictor`,
`SineGen`, `SineGen2`, `SourceModuleHnNSF`) with three deliberate differences. The phase is kept in cycles
and wrapped, so that a long text keeps the precision that the official unwrapped float32 radians lose. Noise
and initial phases are fixed, the noise a function of the absolute sample position, so that a stream hears
the noise of the one-shot call and a repeated request gives the same samples. And a chunk of a stream can
continue the phase of the chunk before; the official source starts anew in each, with a jump.

The families differ in how the phase runs between the mel frames (`PhasePath`), and so in where a frame has
the phase that is carried, its reference point. For a chunk whose first `overlap` frames repeat the last ones
of the chunk before, `phase` is the `phase_out` of that chunk and `phase_frame` is `overlap - 1`. The source
cache holds that chunk's samples of the shared frames up to the reference point of the last one. In
CosyVoice 1 this is the frame's last sample: all `overlap * mel_hop` samples. In CosyVoice 2 it is the
frame's centre; behind it the former source stands still, for it did not know the next frame. So the cache
ends there, after `overlap * mel_hop - mel_hop // 2` samples, where the new source has the same phase.
CosyVoice 3 needs no cache: the frames that its chunk repeats are a context, whose samples are not spoken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.stft import length_mask

NOISE_LENGTH = 262_139
"""Positions of the normal noise: the largest prime below 2^18; it repeats after 10.9 s at 24 kHz."""

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


def normal_noise(harmonics: int, seed: int = 0) -> Tensor:
    """Draw the fixed standard normal noise, FP32 [NOISE_LENGTH, harmonics]: one row per sample position.

    All rows lie in one circular table, `harmonics` entries apart; its prime length makes each another one.
    """
    table = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(seed))
    position = torch.arange(NOISE_LENGTH)[:, None] * harmonics + torch.arange(harmonics)
    return table[position % NOISE_LENGTH]


def initial_phases(harmonics: int, seed: int = 0) -> Tensor:
    """Draw a fixed phase per harmonic, uniform over a cycle and 0 for the fundamental.

    In cycles, FP32 [harmonics]. The official `SineGen` draws new ones in each call.
    """
    phases = torch.rand(harmonics, generator=torch.Generator().manual_seed(seed))
    phases[0] = 0
    return phases


PhasePath = Callable[[Tensor, Tensor, int], Tensor]
"""How the phase runs between frames, in cycles.

From the phases at the frames' reference points, FP32 [B, harmonics, T], the cycles per sample, of the same
shape and zero behind the row's end, and the hop, to the phases of all samples, FP32 [B, harmonics, T * hop].
"""


def summed_over_samples(phase: Tensor, step: Tensor, hop: int) -> Tensor:
    """Run through each frame with its own frequency (CosyVoice 1); reference point: its last sample."""
    before_end = torch.arange(1 - hop, 1, device=phase.device)
    return (phase.unsqueeze(3) + step.unsqueeze(3) * before_end).flatten(2)


def between_centres(phase: Tensor, step: Tensor, hop: int) -> Tensor:
    """Interpolate linearly (CosyVoice 2); reference point: the frame's centre.

    Before the first centre and behind the last the phase stands still.
    """
    # T + 1 spans: up to the first centre, between two centres, behind the last. A masked frame has
    # step 0, so the phase also stands still behind the last centre of a shorter row.
    start = torch.cat([phase[:, :, :1], phase], dim=2)
    still = torch.zeros_like(step[:, :, :1])
    step = torch.cat([still, step[:, :, 1:], still], dim=2)
    offset = torch.arange(hop, device=phase.device) + 0.5
    cycles = start.unsqueeze(3) + step.unsqueeze(3) * offset  # [B, harmonics, T + 1, hop]
    return cycles.flatten(2)[:, :, hop // 2 : -(hop // 2)]


def staircase(phase: Tensor, _step: Tensor, hop: int) -> Tensor:
    """Stand still within each frame (CosyVoice 3); reference point: all of the frame."""
    return phase.unsqueeze(3).expand(-1, -1, -1, hop).flatten(2)


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

    noise: Tensor
    initial_phase: Tensor

    def __init__(self, config: SourceConfig, path: PhasePath, initial_phase: Tensor | None = None) -> None:
        """`initial_phase`: added to each harmonic, cycles, FP32 [harmonics]; none if not given.

        There is no noise before `mix_noise`.
        """
        super().__init__()
        self.config, self.path = config, path
        self.l_linear = nn.Linear(config.harmonics, 1)
        phase = torch.zeros(config.harmonics) if initial_phase is None else initial_phase
        self.register_buffer("initial_phase", phase[None, :, None], persistent=False)
        self.register_buffer("noise", torch.zeros(1), persistent=False)

    def mix_noise(self, noise: Tensor) -> None:
        """Give the noise that the harmonics hear, FP32 [positions, harmonics]; it repeats after the last.

        To be called after the weights are loaded: they mix the harmonics, once and for all.
        """
        with torch.no_grad():
            self.noise = (noise @ self.l_linear.weight[0]).to(self.noise)

    def cycles(self, pitch: Tensor) -> Tensor:
        """Sum the fundamental's cycles: Hz FP32 [B, T] -> FP32 [B, T], at the reference point of each frame.

        Whole cycles are left out. Behind the row's end, where the pitch is zero, they stand still.
        """
        return _phase(pitch * self.config.mel_hop / self.config.sample_rate)

    def forward(self, pitch: Tensor, cycles: Tensor, counts: Tensor, noise_offset: Tensor) -> Tensor:
        """Compute the source, FP32 [B, T * mel_hop], zero beyond the row's end.

        Args:
            pitch: Hz, FP32 [B, T], zero beyond the row's end.
            cycles: the fundamental's phase at the frames' reference points, FP32 [B, T].
            counts: valid mel frames, INT32 [B, 1].
            noise_offset: absolute position of the row's first sample, INT32 [B, 1].

        """
        config = self.config
        voiced = (pitch > config.voiced_threshold).float()
        loudness = voiced * config.noise_sigma + (1 - voiced) * (config.sine_amplitude / 3)
        weight = self.l_linear.weight.unsqueeze(2)  # [1, harmonics, 1]
        sines = functional.conv1d(self.sines(pitch, cycles), weight).squeeze(1) * config.sine_amplitude
        mixed = sines * self._per_sample(voiced)
        mixed = mixed + self._noise(mixed.shape[1], noise_offset) * self._per_sample(loudness)
        source = torch.tanh(mixed + self.l_linear.bias)
        return source * length_mask(counts * config.mel_hop, source.shape[1]).squeeze(1)

    def sines(self, pitch: Tensor, cycles: Tensor) -> Tensor:
        """Compute unit sines of every harmonic: FP32 [B, T], twice -> FP32 [B, harmonics, T * mel_hop]."""
        harmonic = torch.arange(1, self.config.harmonics + 1, device=pitch.device)[None, :, None]
        step = _fraction(pitch[:, None] * harmonic / self.config.sample_rate)  # cycles per sample
        phase = _fraction(cycles[:, None] * harmonic)  # [B, harmonics, T]
        phase = self.path(phase, step, self.config.mel_hop) + self.initial_phase
        return torch.sin(2 * math.pi * _fraction(phase))

    def _noise(self, length: int, offset: Tensor) -> Tensor:
        """Mixed noise from an absolute position on: INT32 [B, 1] -> FP32 [B, length]."""
        size = self.noise.shape[0]
        index = (torch.arange(length, device=offset.device) + offset.long() % size) % size
        return self.noise.index_select(0, index.flatten()).view_as(index)

    def _per_sample(self, frames: Tensor) -> Tensor:
        return frames.unsqueeze(2).expand(-1, -1, self.config.mel_hop).flatten(1)


def carry_phase(cycles: Tensor, phase: Tensor, frame: Tensor) -> Tensor:
    """Shift the cycles of a row, FP32 [B, T], so that they are `phase` at `frame`.

    `phase` FP32 [B, 1] in cycles; `frame` INT32 [B, 1], -1: `phase` stands at the beginning, before frame 0.
    """
    there = cycles.gather(1, frame.long().clamp(0, cycles.shape[1] - 1))
    return cycles + (phase - torch.where(frame >= 0, there, torch.zeros_like(there)))


def last_phase(cycles: Tensor, count: Tensor) -> Tensor:
    """Phase at the last of `count` frames (INT32 [B, 1]), in [0, 1]: FP32 [B, T] -> FP32 [B, 1]."""
    return _fraction(cycles.gather(1, (count.long() - 1).clamp(min=0)))


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
