"""The causal vocoder of CosyVoice 3: no sample depends on more than a few later mel frames.

arXiv 2505.17589; official: `CausalHiFTGenerator`, `CausalConvRNNF0Predictor`. Only the first convolution of
the decoder and that of the pitch predictor look ahead; all others see the past. So a chunk that is not the
last needs no overlap with the next: its samples are final up to where those two convolutions, and the
overlap-add of the inverse STFT, need frames that are not known yet. And they depend on no more than
`CausalVocoder.context` earlier frames, but for the phase, which is carried from chunk to chunk. So a chunk
gets these frames again, and not all of the utterance, as the official one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_export.flow.solver import NOISE_FRAMES, NOISE_SEED
from cosytriton_export.hift import POST_KERNEL, Convolutions, Decoder, HiftConfig
from cosytriton_export.hift_source import (
    HarmonicSource,
    PitchPredictor,
    SourceConfig,
    carry_phase,
    last_phase,
)
from cosytriton_export.stft import length_mask

PITCH_LOOK_AHEAD = 3
"""Later frames that the pitch predictor sees; the official class fixes it."""

OVERLAP_FRAMES = 1
"""Frames at the end of a chunk whose samples the inverse STFT has not completed."""

NOISE_SECONDS = 60
"""Length of the fixed noise, which repeats behind it; the official buffer holds 300 s."""


def uniform_noise(flow: Mapping[str, Any], config: SourceConfig) -> Tensor:
    """Draw the official fixed noise in [0, 1): FP32 [NOISE_SECONDS * sample_rate, harmonics].

    The official code seeds torch where it makes the flow's noise, and draws this noise later, when it
    builds the vocoder. What it draws between is drawn here too: initial values of the flow's token embedding
    and speaker projection and of the pitch predictor, and the vocoder's phases, which have no effect.

    Args:
        flow: the yaml's section `flow`.
        config: sizes of the vocoder's source.

    """
    with torch.device("meta"):  # sizes alone
        projection = nn.Linear(flow["spk_embed_dim"], flow["output_size"])
        predictor = CausalPitchPredictor(config.mel_bins, config.pitch_channels)
    values = sum(p.numel() for module in (projection, predictor) for p in module.parameters())
    generator = torch.Generator().manual_seed(NOISE_SEED)
    torch.randn(config.mel_bins * NOISE_FRAMES, generator=generator)
    torch.randn(flow["vocab_size"] * flow["input_size"], generator=generator)
    torch.rand(values + config.harmonics, generator=generator)
    return torch.rand(NOISE_SECONDS * config.sample_rate, config.harmonics, generator=generator)


class CausalConvolution(nn.Conv1d):
    """A convolution that sees the past alone, or with `look_ahead` the future alone.

    `upsampling` repeats each input before it. With a `stride`, output t ends at input (t + 1) * stride.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        dilation: int = 1,
        stride: int = 1,
        upsampling: int = 1,
        look_ahead: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, dilation=dilation)
        self.upsampling = upsampling
        reach = stride - 1 if stride > 1 else dilation * (kernel - 1)
        self.reach = (0, reach) if look_ahead else (reach, 0)

    def forward(self, x: Tensor) -> Tensor:
        """FP32 [B, inputs, L] -> FP32 [B, outputs, L * upsampling // stride].

        A stride needs an L of one more than a multiple of it.
        """
        if self.upsampling > 1:
            x = x.unsqueeze(3).expand(-1, -1, -1, self.upsampling).flatten(2)
        return super().forward(functional.pad(x, self.reach))


def causal(look_ahead: int) -> Convolutions:
    """Convolutions of a decoder whose first one sees `look_ahead` later frames."""
    conv = CausalConvolution
    return Convolutions(
        first=lambda inputs, outputs: conv(inputs, outputs, look_ahead + 1, look_ahead=True),
        plain=lambda inputs, outputs, kernel, dilation: conv(inputs, outputs, kernel, dilation=dilation),
        up=lambda inputs, outputs, kernel, rate: conv(inputs, outputs, kernel, upsampling=rate),
        down=lambda inputs, outputs, kernel, rate: conv(inputs, outputs, kernel, stride=rate),
    )


class CausalPitchPredictor(PitchPredictor):
    """Fundamental frequency in float64, from PITCH_LOOK_AHEAD later frames and the past.

    The phase sums the pitch over the whole utterance, and with it the errors; so the official predictor runs
    in float64. ONNX Runtime has no float64 convolution for its CPU, therefore it is a matrix product here.
    The weights stay float32 and are widened in the graph.
    """

    def __init__(self, mel_bins: int, channels: int) -> None:
        super().__init__(mel_bins, channels)
        self.condnet[0] = nn.Conv1d(mel_bins, channels, PITCH_LOOK_AHEAD + 1)

    def forward(self, mel: Tensor, mask: Tensor) -> Tensor:
        """Masked mel FP32 [B, mel_bins, T], mask [B, 1, T] -> Hz FP64 [B, T], zero where masked."""
        x, look_ahead = mel.double().transpose(1, 2), PITCH_LOOK_AHEAD
        for layer in self.condnet:
            if isinstance(layer, nn.Conv1d):
                x = _elu(_convolve(x, layer, look_ahead))
                look_ahead = 0
        weight, bias = self.classifier.weight.double(), self.classifier.bias.double()
        pitch = (x @ weight.T + bias).squeeze(2)
        return pitch.abs() * mask.squeeze(1)


def _convolve(x: Tensor, conv: nn.Conv1d, look_ahead: int) -> Tensor:
    """One matrix product over a window of `look_ahead` later frames and the past: [B, T, C] -> [B, T, D]."""
    kernel = conv.kernel_size[0]
    padded = functional.pad(x, (0, 0, kernel - 1 - look_ahead, look_ahead))
    windows = torch.cat([padded[:, i : i + x.shape[1]] for i in range(kernel)], dim=2)
    weight = conv.weight.double().permute(2, 1, 0).flatten(0, 1)  # [kernel * C, D]
    assert conv.bias is not None
    return windows @ weight + conv.bias.double()


def _elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.clamp(max=0).exp() - 1)


class CausalVocoder(Decoder):
    """The stage `vocoder` of CosyVoice 3."""

    def __init__(self, config: HiftConfig, source: HarmonicSource, look_ahead: int) -> None:
        """`look_ahead`: later frames that the decoder sees."""
        super().__init__(config, causal(look_ahead))
        # Both look ahead from the same frame; the official code holds back the sum of the two.
        self.unfinished = max(PITCH_LOOK_AHEAD, look_ahead) + OVERLAP_FRAMES
        self.m_source = source
        self.f0_predictor = CausalPitchPredictor(config.source.mel_bins, config.source.pitch_channels)

    @property
    def context(self) -> int:
        """Earlier mel frames that a sample depends on, but for the phase, which depends on all of them."""
        config, rates = self.config, self.config.upsample_rates
        overlap = config.n_fft / config.source.mel_hop  # of a frame of the STFT; in mel frames, as all here
        reach = (POST_KERNEL - 1) / math.prod(rates) + overlap
        longest = 0.0
        for i in reversed(range(len(rates))):
            rate = math.prod(rates[: i + 1])
            blocks = zip(config.resblock_kernels, config.resblock_dilations, strict=True)
            reach += max(_reach(*block) for block in blocks) / rate
            source = _reach(config.source_kernels[i], config.source_dilations[i]) / rate
            longest = max(longest, reach + source + 2 / rate)  # the convolution down spans two of its strides
            reach += (config.upsample_kernels[i] - 1) / rate
        pitch = 2 * (PitchPredictor.LAYERS - 1)  # kernels of 3, but for the first, which looks ahead
        return math.ceil(max(longest + overlap + pitch, reach))

    def forward(
        self,
        mel: Tensor,
        frame_count: Tensor,
        finalize: Tensor,
        noise_offset: Tensor,
        phase: Tensor,
        phase_frame: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Speak a mel spectrogram, or a chunk of it behind its `context`.

        Args:
            mel: log-mel, FP32 [B, T, mel_bins], padded on the right.
            frame_count: valid frames, INT32 [B, 1].
            finalize: BOOL [B, 1], whether the row ends here. If not, its last frames are only looked at, and
                the samples of its last `unfinished` frames are left to a later call.
            noise_offset: position of the first sample in the whole utterance, INT32 [B, 1].
            phase: of the fundamental in `phase_frame`, in cycles, FP32 [B, 1]; 0 where an utterance begins.
            phase_frame: the last frame of the context, INT32 [B, 1]; -1 where an utterance begins.

        Returns:
            waveform FP32 [B, T * mel_hop] in [-audio_limit, audio_limit], zero beyond the samples that are
            final, and not to be spoken in the context; sample_count INT32 [B, 1] of the final ones, the
            context included; phase_out FP32 [B, 1], the phase in the last frame of these.

        """
        mask = length_mask(frame_count, mel.shape[1])
        masked = mel.transpose(1, 2) * mask  # [B, mel_bins, T]
        pitch = self.f0_predictor(masked, mask).to(mel.dtype)
        cycles = carry_phase(self.m_source.cycles(pitch), phase, phase_frame)
        source = self.m_source(pitch, cycles, frame_count, noise_offset)
        # The last frames of an unfinished row are computed as if it ended; nothing of that reaches the
        # samples before, so they need only be cut off.
        finished = torch.where(finalize, frame_count, (frame_count - self.unfinished).clamp(min=0))
        sample_count = finished * self.config.source.mel_hop
        waveform = self.decode(masked, source, frame_count)
        waveform = waveform * length_mask(sample_count, waveform.shape[1]).squeeze(1)
        return waveform, sample_count, last_phase(cycles, finished)


def _reach(kernel: int, dilations: tuple[int, ...]) -> int:
    """Positions before its own that an output of a residual block depends on."""
    return (kernel - 1) * sum(dilation + 1 for dilation in dilations)
