"""The stage `audio_tokenizer`: a reference recording -> speech tokens."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.features import WhisperLogMel
from cosytriton_export.speech_tokenizer import SpeechTokenizer
from cosytriton_export.speech_tokenizer_reader import read_speech_tokenizer


class AudioTokenizer(nn.Module):
    """Log-mel spectrogram and S3 tokenizer in one graph (official: CosyVoiceFrontEnd)."""

    def __init__(self, tokenizer: SpeechTokenizer) -> None:
        super().__init__()
        self.log_mel = WhisperLogMel()
        self.tokenizer = tokenizer

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Read the weights from `speech_tokenizer_v2.onnx`.

        Raises:
            CheckpointError: the file cannot be read.
            ExportError: it is not the S3 tokenizer v2.

        """
        return cls(read_speech_tokenizer(checkpoint.onnx("speech_tokenizer")))

    def forward(self, waveform_16k: Tensor, sample_count_16k: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] float32 in [-1, 1] and valid samples [B, 1] int32 -> tokens int32 and their count [B, 1].

        Tokens [B, ceil(N // 160 / 4)], 25 a second, are zero beyond the count.
        """
        features, frames = self.log_mel(waveform_16k, sample_count_16k)  # [B, 128, T]
        tokens, count = self.tokenizer(features, frames)
        return tokens, count
