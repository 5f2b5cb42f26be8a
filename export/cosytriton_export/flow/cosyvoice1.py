"""The flow of CosyVoice 1: a conformer encoder, a length regulator and a U-Net (arXiv 2407.05407)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow.conformer import ConformerEncoder
from cosytriton_export.flow.flow import TokenFlow, join_rows, take
from cosytriton_export.flow.length_regulator import InterpolateRegulator, frame_counts
from cosytriton_export.flow.masks import HIDDEN, length_mask
from cosytriton_export.flow.solver import NOISE_FRAMES
from cosytriton_export.flow.unet import ConditionalDecoder

FADE_FRAMES = COSYVOICE1.fade_frames


class MaskedDiffFlow(TokenFlow):
    """Official class `MaskedDiffWithXvec`, for a batch of requests of any length.

    The official noise is fresh in each call, and a stream passes on what two chunks share. Here it is a
    fixed table by position in the utterance: the same request gives the same mel, two chunks agree by
    themselves, and only the encoder's output needs passing on.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        encoder: ConformerEncoder,
        length_regulator: InterpolateRegulator,
        estimator: ConditionalDecoder,
    ) -> None:
        super().__init__(config, estimator)
        self.encoder = encoder
        self.encoder_proj = nn.Linear(config["encoder"]["output_size"], config["output_size"])
        self.length_regulator = length_regulator

    @classmethod
    def build(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        """Make the modules; the configuration has all sizes.

        Raises `CheckpointError`: the speech tokens have another rate than those of CosyVoice-300M.
        """
        rate = config["input_frame_rate"]
        if rate != COSYVOICE1.token_rate:
            raise CheckpointError(
                f"the flow takes {rate} speech tokens per second; only {COSYVOICE1.token_rate} are "
                f"supported, as in {COSYVOICE1.title}."
            )
        layers = len(config["length_regulator"]["sampling_ratios"])
        regulator = InterpolateRegulator(config["output_size"], layers)
        return cls(config, _encoder(config["encoder"]), regulator, _estimator(config["decoder"]["estimator"]))

    def forward(
        self,
        tokens: Tensor,
        token_count: Tensor,
        prompt_tokens: Tensor,
        prompt_token_count: Tensor,
        prompt_mel: Tensor,
        prompt_frame_count: Tensor,
        speaker_embedding: Tensor,
        noise_offset: Tensor,
        mu_cache: Tensor,
        mu_cache_count: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Speak.

        Args:
            tokens: speech tokens, int32 [B, N], padded on the right.
            token_count: int32 [B, 1].
            prompt_tokens: tokens of the reference, int32 [B, P], padded on the right.
            prompt_token_count: int32 [B, 1], 0 without a reference.
            prompt_mel: mel of the reference [B, F, M], padded on the right.
            prompt_frame_count: int32 [B, 1], 0 without a reference.
            speaker_embedding: as the speaker encoder gives it, [B, speaker width].
            noise_offset: position in the utterance of the first frame of `tokens`, int32 [B, 1].
            mu_cache: the third result of the chunk before, [B, C, M].
            mu_cache_count: its frames, int32 [B, 1], 0 without a chunk before.

        The results are the mel [B, frames(N), M], zero beyond the row's frames; the frame count, int32
        [B, 1]; and what the next chunk needs of the encoder's output, [B, F + 34, M]: the frames of the
        reference and the row's last 34, zero beyond (a row has 34 frames or more, or there is no next chunk).
        """
        prompt_frames, frame_count = prompt_frame_count.long(), frame_counts(token_count.long())
        frames = COSYVOICE1.frames(tokens.shape[1])
        extent = prompt_mel.shape[1] + frames  # T
        ids = join_rows(prompt_tokens.long(), prompt_token_count.long(), tokens.long())
        mu = self.encode(ids, prompt_token_count.long(), prompt_frames, token_count.long(), extent)
        mu = overwrite_head(mu, mu_cache, mu_cache_count)
        noise = self.noise(prompt_frames, noise_offset.long(), extent)
        mel = self.speak(mu, speaker_embedding, prompt_mel, prompt_frames, frame_count, noise)

        index = torch.arange(frames, device=mel.device) + prompt_frames
        speech = take(mel, index, frame_count)
        kept = torch.arange(prompt_mel.shape[1] + FADE_FRAMES, device=mel.device)
        index = torch.where(kept < prompt_frames, kept, kept + frame_count - FADE_FRAMES)
        return speech, frame_count.int(), take(mu, index, prompt_frames + FADE_FRAMES)

    def encode(
        self, ids: Tensor, prompt_tokens: Tensor, prompt_frames: Tensor, tokens: Tensor, extent: int
    ) -> Tensor:
        """Estimate the mel from the tokens alone.

        Args:
            ids: tokens of the reference, then those of the sentence, [B, S]; any id outside the vocabulary
                is padding.
            prompt_tokens: of the reference, int64 [B, 1].
            prompt_frames: of the reference, int64 [B, 1].
            tokens: of the sentence, int64 [B, 1].
            extent: padded frames T.

        The estimate is [B, T, M] and meaningless beyond the row's frames.
        """
        bias = key_bias(length_mask(prompt_tokens + tokens, ids.shape[1]))
        hidden = self.encoder_proj(self.encoder(self.embed(ids), bias))
        valid = length_mask(prompt_frames + frame_counts(tokens), extent)[:, None]
        mu: Tensor = self.length_regulator(
            hidden, prompt_tokens, prompt_frames, tokens, valid.to(hidden.dtype)
        )
        return mu.transpose(1, 2)

    def noise(self, prompt_frames: Tensor, offset: Tensor, extent: int) -> Tensor:
        """Take each frame's noise from the fixed table by its position in the utterance; [B, T, M].

        The reference has the first `prompt_frames` [B, 1] of it, the sentence goes on `offset` [B, 1] later.
        """
        position = torch.arange(extent, device=offset.device)
        position = torch.where(position < prompt_frames, position, position + offset) % NOISE_FRAMES
        noise = self.decoder.noise.index_select(2, position.flatten())  # [1, M, B * T]
        return torch.unflatten(noise[0].mT, 0, (-1, extent))

    def speak(
        self,
        mu: Tensor,
        speaker_embedding: Tensor,
        prompt_mel: Tensor,
        prompt_frames: Tensor,
        frame_count: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """Solve for the mel of reference and sentence, from given noise.

        Args:
            mu: the encoder's output [B, T, M].
            speaker_embedding: as in `forward`, [B, speaker width].
            prompt_mel: as in `forward`, [B, F, M], F <= T.
            prompt_frames: int64 [B, 1].
            frame_count: frames of the sentence, int64 [B, 1].
            noise: [B, T, M].

        The mel is [B, T, M] and meaningless beyond the row's frames.
        """
        reference = prompt_mel * length_mask(prompt_frames, prompt_mel.shape[1])[..., None]
        prompt = F.pad(reference, (0, 0, 0, mu.shape[1] - prompt_mel.shape[1]))
        bias = key_bias(length_mask(prompt_frames + frame_count, mu.shape[1]))
        mel: Tensor = self.decoder(mu.mT, self.speaker(speaker_embedding), prompt.mT, bias, noise.mT)
        return mel.transpose(1, 2)


def key_bias(valid: Tensor) -> Tensor:
    """Additive mask that hides the keys outside `valid` [B, T] from all queries; float32 [B, 1, 1, T]."""
    return (~valid)[:, None, None].to(torch.float32) * HIDDEN


def overwrite_head(mu: Tensor, cache: Tensor, count: Tensor) -> Tensor:
    """Replace the first `count` [B, 1] frames of mu [B, T, M] by those of the cache [B, C, M]."""
    index = torch.arange(mu.shape[1], device=mu.device)
    cached = cache.index_select(1, index.clamp(max=cache.shape[1] - 1))
    return torch.where((index < count)[..., None], cached, mu)


def _encoder(sizes: Mapping[str, Any]) -> ConformerEncoder:
    return ConformerEncoder(
        sizes["input_size"],
        sizes["output_size"],
        sizes["attention_heads"],
        sizes["linear_units"],
        sizes["num_blocks"],
    )


def _estimator(sizes: Mapping[str, Any]) -> ConditionalDecoder:
    return ConditionalDecoder(
        sizes["in_channels"],
        sizes["out_channels"],
        sizes["channels"],
        sizes["num_heads"],
        sizes["attention_head_dim"],
        sizes["n_blocks"],
        sizes["num_mid_blocks"],
    )
