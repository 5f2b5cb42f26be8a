"""The stage `speaker_embedding`: a reference recording -> who speaks."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from cosytriton_export.campplus import CamPPlus
from cosytriton_export.campplus_reader import read_campplus
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.features import KaldiFbank, mean_normalised


class SpeakerEmbedding(nn.Module):
    """Filter bank, mean normalisation and CAM++ in one graph (official: CosyVoiceFrontEnd)."""

    def __init__(self, campplus: CamPPlus) -> None:
        super().__init__()
        self.fbank = KaldiFbank()
        self.campplus = campplus

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Read the weights from `campplus.onnx`.

        Raises:
            CheckpointError: the file cannot be read.
            ExportError: it is not CAM++.

        """
        return cls(read_campplus(checkpoint.onnx("campplus")))

    def forward(self, waveform_16k: Tensor, sample_count_16k: Tensor) -> tuple[Tensor]:
        """[B, N] float32 in [-1, 1] and valid samples [B, 1] int32 -> embedding [B, size], not normalised."""
        features, frames = self.fbank(waveform_16k, sample_count_16k)  # [B, 80, T]
        normalised = mean_normalised(features, frames)
        return (self.campplus(normalised.transpose(1, 2), frames),)
