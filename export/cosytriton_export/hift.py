"""The vocoder: mel spectrogram to waveform (HiFT, neural source filter with inverse STFT).

CosyVoice 2, arXiv 2412.10117; HiFTNet, arXiv 2309.09493; official: `HiFTGenerator`. Module names are the
keys of `hift.pt`. Rows of a batch have unequal lengths: everything beyond a row's end is set to zero
after every convolution, so that the end of a row sounds as it does alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hift_source import HarmonicSource, PitchPredictor, SourceConfig, noise_table
from cosytriton_export.stft import InverseStft, Stft, hann_window, length_mask
from cosytriton_export.weights import load_weights

MAX_MAGNITUDE = 100.0  # of a bin of the inverse STFT
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


class ResidualBlock(nn.Module):
    """Per dilation: Snake, dilated convolution, Snake, convolution, and the input added."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()

        def convolution(dilation: int) -> nn.Conv1d:
            padding = dilation * (kernel - 1) // 2
            return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding)

        self.convs1 = nn.ModuleList(convolution(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(convolution(1) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Masked FP32 [B, channels, L] -> the same shape, masked."""
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for snake1, conv1, snake2, conv2 in layers:
            x = x + conv2(snake2(conv1(snake1(x)) * mask)) * mask
        return x


class Vocoder(nn.Module):
    """The stage `vocoder`."""

    def __init__(self, config: HiftConfig, noise: Tensor | None = None) -> None:
        """`noise`: the fixed standard normal table, FP32 [n]; `noise_table()` if not given."""
        super().__init__()
        self.config = config
        mel_bins, rates, kernels = config.source.mel_bins, config.upsample_rates, config.upsample_kernels
        spectrum = config.n_fft + 2  # real and imaginary parts of the bins
        widths = [config.channels >> i for i in range(len(rates) + 1)]
        self.m_source = HarmonicSource(config.source, noise_table() if noise is None else noise)
        self.conv_pre = nn.Conv1d(mel_bins, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(widths[i], widths[i + 1], kernel, rate, padding=(kernel - rate) // 2)
            for i, (rate, kernel) in enumerate(zip(rates, kernels, strict=True))
        )
        self.source_downs = nn.ModuleList(
            _source_down(spectrum, width, math.prod(rates[i + 1 :])) for i, width in enumerate(widths[1:])
        )
        self.source_resblocks = nn.ModuleList(
            ResidualBlock(*sizes)
            for sizes in zip(widths[1:], config.source_kernels, config.source_dilations, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernels, config.resblock_dilations, strict=True)
        )
        self.conv_post = nn.Conv1d(widths[-1], spectrum, 7, padding=3)
        self.f0_predictor = PitchPredictor(mel_bins, config.source.pitch_channels)
        self.stft = Stft(hann_window(config.n_fft), config.stft_hop)
        self.istft = InverseStft(hann_window(config.n_fft), config.stft_hop)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Load the vocoder of a checkpoint.

        Raises:
            CheckpointError: the weights do not fit the yaml, or the yaml not the family.

        """
        config, family = HiftConfig.from_yaml(checkpoint.config["hift"]), checkpoint.family
        rates = config.source.sample_rate, config.source.mel_hop
        if rates != (family.sample_rate, family.mel_hop):
            raise CheckpointError(
                f"{checkpoint.path}: the vocoder gives {rates[0]} Hz with {rates[1]} samples per mel frame, "
                f"{family.name} has {family.sample_rate} Hz and {family.mel_hop}."
            )
        vocoder = cls(config)
        load_weights(vocoder, checkpoint.state("hift"), "hift.pt")
        return vocoder.eval()

    def forward(
        self,
        mel: Tensor,
        frame_count: Tensor,
        source_cache: Tensor,
        source_cache_count: Tensor,
        noise_offset: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Speak a mel spectrogram.

        Args:
            mel: log-mel, FP32 [B, T, mel_bins], padded on the right.
            frame_count: valid frames, INT32 [B, 1].
            source_cache: FP32 [B, C], the source of an earlier chunk where it overlaps this one.
            source_cache_count: how many samples of it are valid, INT32 [B, 1], 0 for a first chunk.
            noise_offset: position of the first sample in the whole utterance, INT32 [B, 1].

        Returns:
            waveform in [-audio_limit, audio_limit] and source, both FP32 [B, T * mel_hop] and zero beyond
            the row's end; sample_count INT32 [B, 1].

        """
        mask = length_mask(frame_count, mel.shape[1])
        masked = mel.transpose(1, 2) * mask  # [B, mel_bins, T]
        sample_count = frame_count * self.config.source.mel_hop

        source = self.m_source(self.f0_predictor(masked, mask), frame_count, noise_offset)
        position = torch.arange(source.shape[1], device=source.device)
        cached = source_cache.index_select(1, position.clamp(max=source_cache.shape[1] - 1))
        source = torch.where(position < source_cache_count.minimum(sample_count), cached, source)
        return self.decode(masked, source, frame_count), source, sample_count

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


def _source_down(spectrum: int, width: int, rate: int) -> nn.Conv1d:
    """Brings the source's spectrum to the rate of a stage."""
    if rate == 1:
        return nn.Conv1d(spectrum, width, 1)
    return nn.Conv1d(spectrum, width, 2 * rate, rate, padding=rate // 2)
