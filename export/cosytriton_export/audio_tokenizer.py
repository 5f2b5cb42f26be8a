"""The stage `audio_tokenizer`: a reference recording -> speech tokens."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.features import WhisperLogMel
from cosytriton_export.speech_tokenizer import SpeechTokenizer, Version
from cosytriton_export.speech_tokenizer_reader import read_speech_tokenizer

VERSIONS: dict[str, Version] = {COSYVOICE1.name: 1, COSYVOICE2.name: 2, COSYVOICE3.name: 3}
"""The S3 tokenizer of each family."""


class AudioTokenizer(nn.Module):
    """Log-mel spectrogram and S3 tokenizer in one graph (official: CosyVoiceFrontEnd)."""

    def __init__(self, tokenizer: SpeechTokenizer) -> None:
        super().__init__()
        self.log_mel = WhisperLogMel()
        self.tokenizer = tokenizer

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Read the weights from the family's `speech_tokenizer_v*.onnx`.

        Raises:
            CheckpointError: the file cannot be read, or is another family's.
            ExportError: it is no S3 tokenizer.

        """
        version = VERSIONS[checkpoint.family.name]
        return cls(read_speech_tokenizer(checkpoint.onnx("speech_tokenizer"), version))

    def forward(self, waveform_16k: Tensor, sample_count_16k: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] float32 in [-1, 1] and valid samples [B, 1] int32 -> tokens int32 and their count.

        Of N // 160 frames, each token takes four, in CosyVoice 1 two: tokens [B, ceil(frames / 4)] at 25 a
        second, or [B, ceil(frames / 2)] at 50. They are zero beyond the count [B, 1].
        """
        features, frames = self.log_mel(waveform_16k, sample_count_16k)  # [B, 128, T]
        tokens, count = self.tokenizer(features, frames)
        return tokens, count
