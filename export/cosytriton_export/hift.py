"""The vocoder: mel spectrogram to waveform (HiFT, neural source filter with inverse STFT).

HiFTNet, arXiv 2309.09493, as in CosyVoice 1 and 2 (arXiv 2407.05407, 2412.10117; official:
`HiFTGenerator`); `hift_causal` has the one of CosyVoice 3. Module names are the keys of `hift.pt`. Rows of
a batch have unequal lengths: everything beyond a row's end is set to zero after every convolution, so that
the end of a row sounds as it does alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.hift_source import (
    HarmonicSource,
    PitchPredictor,
    SourceConfig,
    carry_phase,
    last_phase,
)
from cosytriton_export.stft import InverseStft, Stft, hann_window, length_mask

MAX_MAGNITUDE = 100.0  # of a bin of the inverse STFT
POST_KERNEL = 7  # of the last convolution
POST_SLOPE = 0.01  # of the last leaky ReLU; the others have the configured one


@dataclass(frozen=True, slots=True)
class HiftConfig:
    """Sizes of the vocoder, named as in the checkpoint's yaml."""

    source: SourceConfig
    channels: int  # behind the first convolution; each stage halves them
    upsample_rates: tuple[int, ...]
    upsample_kernels: tuple[int, ...]
    n_fft: int
    stft_hop: int
    resblock_kernels: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]
    source_kernels: tuple[int, ...]
    source_dilations: tuple[tuple[int, ...], ...]
    slope: float  # of the leaky ReLU before each upsampling
    audio_limit: float
    look_ahead: int  # later mel frames that the first convolution sees; CosyVoice 3 alone

    @classmethod
    def from_yaml(cls, hift: Mapping[str, Any]) -> Self:
        """From the yaml's section `hift`."""
        rates, stft_hop = tuple(hift["upsample_rates"]), hift["istft_params"]["hop_len"]
        source = SourceConfig(
            sample_rate=hift["sampling_rate"],
            mel_hop=math.prod(rates) * stft_hop,
            mel_bins=hift["in_channels"],
            pitch_channels=hift["f0_predictor"]["cond_channels"],
            harmonics=hift["nb_harmonics"] + 1,
            sine_amplitude=hift["nsf_alpha"],
            noise_sigma=hift["nsf_sigma"],
            voiced_threshold=hift["nsf_voiced_threshold"],
        )
        return cls(
            source=source,
            channels=hift["base_channels"],
            upsample_rates=rates,
            upsample_kernels=tuple(hift["upsample_kernel_sizes"]),
            n_fft=hift["istft_params"]["n_fft"],
            stft_hop=stft_hop,
            resblock_kernels=tuple(hift["resblock_kernel_sizes"]),
            resblock_dilations=tuple(map(tuple, hift["resblock_dilation_sizes"])),
            source_kernels=tuple(hift["source_resblock_kernel_sizes"]),
            source_dilations=tuple(map(tuple, hift["source_resblock_dilation_sizes"])),
            slope=hift["lrelu_slope"],
            audio_limit=hift["audio_limit"],
            look_ahead=hift.get("conv_pre_look_right", 4),  # the default of the official class
        )


class Snake(nn.Module):
    """x + sin^2(alpha x) / alpha with one alpha per channel (arXiv 2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """FP32 [B, channels, L] -> the same shape; zero stays zero."""
        alpha = self.alpha[:, None]
        wave = (x * alpha).sin()
        return x + wave * wave * (1 / (alpha + 1e-9))


@dataclass(frozen=True, slots=True)
class Convolutions:
    """How a decoder's convolutions are made."""

    first: Callable[[int, int], nn.Module]  # inputs, outputs
    plain: Callable[[int, int, int, int], nn.Module]  # inputs, outputs, kernel, dilation
    up: Callable[[int, int, int, int], nn.Module]  # inputs, outputs, kernel, rate
    down: Callable[[int, int, int, int], nn.Module]  # inputs, outputs, kernel, rate


def _centred(inputs: int, outputs: int, kernel: int, dilation: int) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)


CENTRED = Convolutions(
    first=lambda inputs, outputs: _centred(inputs, outputs, 7, 1),
    plain=_centred,
    up=lambda inputs, outputs, kernel, rate: nn.ConvTranspose1d(
        inputs, outputs, kernel, rate, padding=(kernel - rate) // 2
    ),
    down=lambda inputs, outputs, kernel, rate: nn.Conv1d(
        inputs, outputs, kernel, rate, padding=rate // 2 if rate > 1 else 0
    ),
)


class ResidualBlock(nn.Module):
    """Per dilation: Snake, dilated convolution, Snake, convolution, and the input added."""

    def __init__(
        self, convolutions: Convolutions, channels: int, kernel: int, dilations: tuple[int, ...]
    ) -> None:
        super().__init__()
        plain = convolutions.plain
        self.convs1 = nn.ModuleList(plain(channels, channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(plain(channels, channels, kernel, 1) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Masked FP32 [B, channels, L] -> the same shape, masked."""
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(snake2(conv1(snake1(x)) * mask)) * mask
        return x


class Decoder(nn.Module):
    """The part that all families share: filters a source after a mel spectrogram."""

    def __init__(self, config: HiftConfig, convolutions: Convolutions) -> None:
        super().__init__()
        self.config = config
        rates, kernels = config.upsample_rates, config.upsample_kernels
        spectrum = config.n_fft + 2  # real and imaginary parts of the bins
        widths = [config.channels >> i for i in range(len(rates) + 1)]
        self.conv_pre = convolutions.first(config.source.mel_bins, widths[0])
        self.ups = nn.ModuleList(
            convolutions.up(widths[i], widths[i + 1], kernel, rate)
            for i, (rate, kernel) in enumerate(zip(rates, kernels, strict=True))
        )
        remaining = [math.prod(rates[i + 1 :]) for i in range(len(rates))]
        self.source_downs = nn.ModuleList(
            convolutions.down(spectrum, width, 2 * rate if rate > 1 else 1, rate)
            for width, rate in zip(widths[1:], remaining, strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            ResidualBlock(convolutions, *sizes)
            for sizes in zip(widths[1:], config.source_kernels, config.source_dilations, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(convolutions, width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernels, config.resblock_dilations, strict=True)
        )
        self.conv_post = convolutions.plain(widths[-1], spectrum, POST_KERNEL, 1)
        self.stft = Stft(hann_window(config.n_fft), config.stft_hop)
        self.istft = InverseStft(hann_window(config.n_fft), config.stft_hop)

    def decode(self, mel: Tensor, source: Tensor, frame_count: Tensor) -> Tensor:
        """Filter the source: masked mel FP32 [B, mel_bins, T], source FP32 [B, N] -> FP32 [B, N]."""
        config = self.config
        stft = self.stft(source, frame_count * config.source.mel_hop)  # [B, n_fft + 2, N / stft_hop + 1]
        stft = stft * self._stft_mask(frame_count, stft.shape[2])

        x = self.conv_pre(mel) * length_mask(frame_count, mel.shape[2])
        rate = 1
        for i, (up, down) in enumerate(zip(self.ups, self.source_downs, strict=True)):
            rate *= config.upsample_rates[i]
            x = up(functional.leaky_relu(x, config.slope))
            if i < len(self.ups) - 1:
                mask = length_mask(frame_count * rate, x.shape[2])
            else:
                x = functional.pad(x, (1, 0), mode="reflect")  # an STFT has one frame more than hops
                mask = self._stft_mask(frame_count, x.shape[2])
            x = x * mask + self.source_resblocks[i](down(stft) * mask, mask)
            blocks = len(config.resblock_kernels)
            stage = self.resblocks[i * blocks : (i + 1) * blocks]
            x = torch.stack([block(x, mask) for block in stage]).sum(0) / blocks
        spectrum = self.conv_post(functional.leaky_relu(x, POST_SLOPE))
        return self._waveform(spectrum, mask, frame_count)

    def _waveform(self, spectrum: Tensor, mask: Tensor, frame_count: Tensor) -> Tensor:
        # Log magnitude and the sine of the phase; the limit is set before exp, which FP16 cannot hold.
        magnitude, phase = spectrum.chunk(2, dim=1)
        magnitude = magnitude.clamp(max=math.log(MAX_MAGNITUDE)).exp() * mask
        phase = phase.sin()
        waveform: Tensor = self.istft(
            torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=1), mask
        )
        waveform = waveform.clamp(-self.config.audio_limit, self.config.audio_limit)
        return waveform * length_mask(frame_count * self.config.source.mel_hop, waveform.shape[1]).squeeze(1)

    def _stft_mask(self, frame_count: Tensor, length: int) -> Tensor:
        return length_mask(frame_count * math.prod(self.config.upsample_rates) + 1, length)


class Vocoder(Decoder):
    """The stage `vocoder` of CosyVoice 1 and 2; they differ in their sizes and in the source."""

    def __init__(self, config: HiftConfig, source: HarmonicSource) -> None:
        super().__init__(config, CENTRED)
        self.m_source = source
        self.f0_predictor = PitchPredictor(config.source.mel_bins, config.source.pitch_channels)

    def forward(
        self,
        mel: Tensor,
        frame_count: Tensor,
        source_cache: Tensor,
        source_cache_count: Tensor,
        noise_offset: Tensor,
        phase: Tensor,
        phase_frame: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Speak a mel spectrogram.

        Args:
            mel: log-mel, FP32 [B, T, mel_bins], padded on the right.
            frame_count: valid frames, INT32 [B, 1].
            source_cache: FP32 [B, C], the source of an earlier chunk where it overlaps this one.
            source_cache_count: how many samples of it are valid, INT32 [B, 1], 0 for a first chunk.
            noise_offset: position of the first sample in the whole utterance, INT32 [B, 1].
            phase: of the fundamental at the reference point of `phase_frame` (see `hift_source`), in cycles,
                FP32 [B, 1]; 0 for a first chunk.
            phase_frame: INT32 [B, 1]; -1 for a first chunk, whose phase starts before frame 0.

        Returns:
            waveform in [-audio_limit, audio_limit] and source, both FP32 [B, T * mel_hop] and zero beyond
            the row's end; sample_count INT32 [B, 1]; phase_out FP32 [B, 1], the phase at the last valid
            frame.

        """
        mask = length_mask(frame_count, mel.shape[1])
        masked = mel.transpose(1, 2) * mask  # [B, mel_bins, T]
        sample_count = frame_count * self.config.source.mel_hop

        pitch = self.f0_predictor(masked, mask)
        cycles = carry_phase(self.m_source.cycles(pitch), phase, phase_frame)
        source = self.m_source(pitch, cycles, frame_count, noise_offset)
        position = torch.arange(source.shape[1], device=source.device)
        cached = source_cache.index_select(1, position.clamp(max=source_cache.shape[1] - 1))
        source = torch.where(position < source_cache_count.minimum(sample_count), cached, source)
        return self.decode(masked, source, frame_count), source, sample_count, last_phase(cycles, frame_count)
