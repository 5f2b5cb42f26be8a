"""Acoustic features as modules, so that a stage's graph takes audio and not features.

Every module maps `waveform` [B, N] float32 in [-1, 1] and `count` [B, 1] int32 (valid samples per row) to
features [B, bins, frames] float32 and the valid frames per row [B, 1] int32. Features beyond a row's count
are zero, and what stands in the waveform beyond its count has no influence. Short-time Fourier transforms
are convolutions with a constant basis: no DFT operator is needed.

Sources: "Robust Speech Recognition via Large-Scale Weak Supervision" (arXiv 2212.04356) for the log-mel
spectrogram, the Kaldi toolkit for the filter bank, "HiFi-GAN" (arXiv 2010.05646) for the mel spectrogram.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_ensemble.families import COSYVOICE2, Family
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, MEL_BINS
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.filterbanks import Array, kaldi_filters, kaldi_frame, slaney_filters
from cosytriton_export.stft import hann_window, length_mask, reflect_pad, stft_basis

FEATURE_RATE = 100  # frames a second of the log-mel spectrogram and the filter bank
WHISPER_BINS = 128
_WHISPER_FFT = 400  # samples, 25 ms
_WHISPER_RANGE = 8.0  # decades kept below the loudest bin of a recording
_HOP = ANALYSIS_RATE // FEATURE_RATE  # samples, 10 ms
_KALDI_WINDOW = ANALYSIS_RATE // 40  # samples, 25 ms
_KALDI_FFT = 512
_KALDI_PRE_EMPHASIS = 0.97
_KALDI_FLOOR = float(np.finfo(np.float32).eps)  # of the energy of a mel bin


def _float32(array: Array) -> Tensor:
    return torch.from_numpy(array).float()


class Spectrogram(nn.Module):
    """Power spectra of overlapping frames: [B, N] -> [B, bins, (N - width) // hop + 1]."""

    basis: Tensor

    def __init__(self, basis: Tensor, hop: int) -> None:
        """`basis` is FP32 [2 * bins, 1, width], real rows first."""
        super().__init__()
        self.hop = hop
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, waveform: Tensor) -> Tensor:
        """Squared magnitudes of each frame's windowed Fourier transform."""
        real, imaginary = functional.conv1d(waveform.unsqueeze(1), self.basis, stride=self.hop).chunk(
            2, dim=1
        )
        return real * real + imaginary * imaginary


class WhisperLogMel(nn.Module):
    """The 128-bin log-mel spectrogram at 16 kHz that the speech tokenizer hears (official: whisper).

    N samples give N // 160 frames. The dynamic range is cut 8 decades below the loudest bin of the row's
    valid frames.
    """

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.spectrogram = Spectrogram(stft_basis(hann_window(_WHISPER_FFT)), _HOP)
        filters = slaney_filters(ANALYSIS_RATE, _WHISPER_FFT, WHISPER_BINS)
        self.register_buffer("filters", _float32(filters), persistent=False)

    def forward(self, waveform: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel features [B, 128, N // 160], about -1 to 1, and valid frames [B, 1]."""
        # One hop less on the right leaves out the last frame, which Whisper drops.
        half = _WHISPER_FFT // 2
        power = self.spectrogram(reflect_pad(waveform, count, half, half - _HOP))
        frames = count // _HOP
        mask = length_mask(frames, power.shape[2])  # [B, 1, T]
        decades = torch.log10((self.filters @ power).clamp(min=1e-10))
        loudest = torch.where(mask > 0, decades, -10.0).amax(dim=(1, 2), keepdim=True)
        scaled = (torch.maximum(decades, loudest - _WHISPER_RANGE) + 4) / 4
        return scaled * mask, frames


def _kaldi_basis() -> Tensor:
    # Frame preparation is linear, so it folds into the basis: FP32 [2 * 257, 1, 400].
    fourier = stft_basis(torch.ones(_KALDI_FFT))[:, 0, :_KALDI_WINDOW].double()
    frame = torch.from_numpy(kaldi_frame(_KALDI_WINDOW, _KALDI_PRE_EMPHASIS))
    return (fourier @ frame).float().unsqueeze(1)


class KaldiFbank(nn.Module):
    """Kaldi's 80-bin log filter bank at 16 kHz without dither (official: torchaudio's kaldi.fbank).

    N samples give (N - 400) // 160 + 1 frames: only whole frames (snip_edges). Samples stay in [-1, 1].
    """

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.spectrogram = Spectrogram(_kaldi_basis(), _HOP)
        filters = kaldi_filters(ANALYSIS_RATE, _KALDI_FFT, MEL_BINS)
        self.register_buffer("filters", _float32(filters), persistent=False)

    def forward(self, waveform: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Natural logarithms of the energies [B, 80, T] and valid frames [B, 1]."""
        power = self.spectrogram(waveform)
        frames = ((count - _KALDI_WINDOW) // _HOP + 1).clamp(min=0)
        energies = (self.filters @ power).clamp(min=_KALDI_FLOOR).log()
        return energies * length_mask(frames, power.shape[2]), frames


def mean_normalised(features: Tensor, frames: Tensor) -> Tensor:
    """Subtract each bin's mean over the row's valid frames: [B, bins, T], zero beyond, stays zero beyond."""
    mean = features.sum(dim=2, keepdim=True) / frames.clamp(min=1).unsqueeze(2)
    return (features - mean) * length_mask(frames, features.shape[2])


class MelSpectrogram(nn.Module):
    """The mel spectrogram of the flow and the vocoder (official: matcha's mel_spectrogram).

    N samples give N // hop frames; the waveform is mirrored by (n_fft - hop) / 2 at both ends.
    """

    filters: Tensor

    def __init__(
        self,
        sample_rate: int = COSYVOICE2.sample_rate,
        n_fft: int = 1920,
        hop: int = COSYVOICE2.mel_hop,
        bins: int = MEL_BINS,
        low: float = 0,
        high: float | None = 8000,
    ) -> None:
        """Sizes in samples; `low` and `high` in Hz, where None means half the sample rate."""
        super().__init__()
        self.hop, self.pad = hop, (n_fft - hop) // 2
        self.spectrogram = Spectrogram(stft_basis(hann_window(n_fft)), hop)
        filters = slaney_filters(sample_rate, n_fft, bins, low, high)
        self.register_buffer("filters", _float32(filters), persistent=False)

    def forward(self, waveform: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Natural logarithms of the mel magnitudes [B, bins, N // hop] and valid frames [B, 1]."""
        magnitude = (self.spectrogram(reflect_pad(waveform, count, self.pad, self.pad)) + 1e-9).sqrt()
        frames = count // self.hop
        logs = (self.filters @ magnitude).clamp(min=1e-5).log()
        return logs * length_mask(frames, logs.shape[2]), frames


class PromptMel(nn.Module):
    """The stage `prompt_mel`: a reference recording at the model's rate -> the mel that the flow extends."""

    def __init__(self, mel: MelSpectrogram) -> None:
        super().__init__()
        self.mel = mel

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Read the extractor's sizes from the checkpoint's yaml.

        Raises:
            CheckpointError: the yaml has no usable `feat_extractor`.
        """
        return cls.from_config(checkpoint.config, checkpoint.family)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: Family) -> Self:
        """Read the extractor's sizes from the node `feat_extractor` of a checkpoint's yaml.

        Raises:
            CheckpointError: the node cannot be read, or does not make the mel frames of `family`.
        """
        try:
            node = config["feat_extractor"]
            n_fft, window, hop = (int(node[key]) for key in ("n_fft", "win_size", "hop_size"))
            rate, bins = int(node["sampling_rate"]), int(node["num_mels"])
            low, centred = float(node["fmin"]), bool(node["center"])
            high = None if node["fmax"] is None else float(node["fmax"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The yaml's feat_extractor cannot be read ({error!r}). It needs n_fft, win_size, hop_size, "
                "sampling_rate, num_mels, fmin, fmax and center, as in the official configuration."
            ) from error
        if (rate, hop, bins) != (family.sample_rate, family.mel_hop, MEL_BINS):
            raise CheckpointError(
                f"The yaml's feat_extractor makes {bins} bins every {hop} samples at {rate} Hz; "
                f"{family.title} has {MEL_BINS} bins every {family.mel_hop} samples at {family.sample_rate} "
                f"Hz. Use the official {family.config_file}."
            )
        if window != n_fft or centred:
            raise CheckpointError(
                f"The yaml's feat_extractor has win_size {window}, n_fft {n_fft}, center {centred}; only "
                "win_size equal to n_fft and center False are supported."
            )
        return cls(MelSpectrogram(rate, n_fft, hop, bins, low, high))

    def forward(self, waveform_model: Tensor, sample_count_model: Tensor) -> tuple[Tensor, Tensor]:
        """Mel of audio at the model's own rate, and its valid frames.

        [B, N] float32 in [-1, 1] and valid samples [B, 1] int32 -> mel [B, N // hop, 80] float32 and frames
        [B, 1] int32.
        """
        mel, frames = self.mel(waveform_model, sample_count_model)
        return mel.transpose(1, 2), frames
