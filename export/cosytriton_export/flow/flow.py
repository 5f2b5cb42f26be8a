"""The flow stage: speech tokens, reference and speaker to mel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow.encoder import UpsampleConformerEncoder
from cosytriton_export.flow.estimator import CausalConditionalDecoder
from cosytriton_export.flow.masks import attention_bias, length_mask
from cosytriton_export.flow.solver import ConditionalFlow
from cosytriton_export.weights import load_weights


class Flow(nn.Module):
    """The flow of CosyVoice 2 (arXiv 2412.10117) for a batch of requests of any length and mode."""

    def __init__(
        self,
        vocabulary: int,
        token_width: int,
        encoder_width: int,
        mel_bins: int,
        speaker_width: int,
        lookahead: int,
        encoder: UpsampleConformerEncoder,
        decoder: ConditionalFlow,
    ) -> None:
        super().__init__()
        self.lookahead = lookahead  # tokens
        self.input_embedding = nn.Embedding(vocabulary, token_width)
        self.spk_embed_affine_layer = nn.Linear(speaker_width, mel_bins)
        self.encoder = encoder
        self.encoder_proj = nn.Linear(encoder_width, mel_bins)
        self.decoder = decoder

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Build the flow of a checkpoint; `CheckpointError` when weights and configuration do not fit."""
        return cls.from_config(
            checkpoint.config["flow"], checkpoint.state("flow"), str(checkpoint.path / "flow.pt")
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Self:
        """Build from the `flow` part of the configuration and a state dict that came from `source`."""
        mel_bins = config["output_size"]
        encoder = _encoder(config, _up_layers(state))
        decoder = ConditionalFlow(
            _estimator(config["decoder"]["estimator"]),
            mel_bins,
            config["decoder"]["cfm_params"]["content"]["inference_cfg_rate"],
        )
        flow = cls(
            config["vocab_size"],
            config["input_size"],
            config["encoder"]["output_size"],
            mel_bins,
            config["spk_embed_dim"],
            config["pre_lookahead_len"],
            encoder,
            decoder,
        )
        load_weights(flow, state, source)
        return flow.eval()

    def forward(
        self,
        tokens: Tensor,
        token_count: Tensor,
        prompt_tokens: Tensor,
        prompt_token_count: Tensor,
        prompt_mel: Tensor,
        speaker_embedding: Tensor,
        streaming: Tensor,
        finalize: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Speak.

        Args:
            tokens: speech tokens, int32 [B, N], padded on the right.
            token_count: int32 [B, 1].
            prompt_tokens: tokens of the reference, int32 [B, P], padded on the right.
            prompt_token_count: int32 [B, 1], 0 without a reference.
            prompt_mel: mel of the reference [B, F, M]; its first `stride * prompt_token_count` frames count.
            speaker_embedding: as the speaker encoder gives it, [B, speaker width].
            streaming: bool [B, 1], the block mask instead of full attention.
            finalize: bool [B, 1], false when the last `lookahead` tokens are only context.

        The results are the mel [B, stride * N, M], zero beyond the row's frames, and the frame count,
        int32 [B, 1].
        """
        stride = self.encoder.stride
        prompt_count, given = prompt_token_count.long(), (prompt_token_count + token_count).long()
        count = given - torch.where(finalize, 0, self.lookahead)
        ids = join_rows(prompt_tokens.long(), prompt_count, tokens.long())
        mu = self.encode(ids, given, count, streaming)  # [B, M, T], T = stride * (P + N)
        extent = mu.shape[2]
        prompt = self.prompt(prompt_mel, prompt_count * stride, extent)
        bias = attention_bias(count * stride, streaming, self.encoder.block * stride, extent)
        mel = self.decoder(mu, self.speaker(speaker_embedding), prompt, bias).transpose(1, 2)

        frames, frame_count = tokens.shape[1] * stride, (count - prompt_count).clamp(min=0) * stride
        index = torch.arange(frames, device=mel.device) + prompt_count * stride  # [B, frames]
        target = mel.gather(1, index[..., None].expand(-1, -1, mel.shape[2]))
        return target * length_mask(frame_count, frames)[..., None], frame_count.int()

    def encode(self, ids: Tensor, given: Tensor, count: Tensor, streaming: Tensor) -> Tensor:
        """Token ids [B, S] to the encoder's mel estimate [B, M, stride * S]."""
        embedded = self.input_embedding(ids.clamp(0, self.input_embedding.num_embeddings - 1))
        mu: Tensor = self.encoder_proj(self.encoder(embedded, given, count, streaming))
        return mu.transpose(1, 2)

    def speaker(self, embedding: Tensor) -> Tensor:
        """Speaker embedding [B, speaker width] to the estimator's [B, M]."""
        speaker: Tensor = self.spk_embed_affine_layer(F.normalize(embedding, dim=1))
        return speaker

    def prompt(self, mel: Tensor, count: Tensor, extent: int) -> Tensor:
        """Extend the reference mel [B, F, M] to [B, M, extent], zero beyond `count` [B, 1] frames."""
        index = torch.arange(extent, device=mel.device).clamp(max=mel.shape[1] - 1)
        valid = length_mask(count.clamp(max=mel.shape[1]), extent)
        return (mel.index_select(1, index) * valid[..., None]).transpose(1, 2)


def join_rows(first: Tensor, count: Tensor, second: Tensor) -> Tensor:
    """Append `second` [B, N] to the first `count` [B, 1] entries of `first` [B, P]; returns [B, P + N].

    The padding of `first` ends up behind both, so that no hole stands between them.
    """
    extent = first.shape[1] + second.shape[1]
    position = torch.arange(extent, device=first.device)
    source = torch.where(position < count, position, position - count + first.shape[1])
    return torch.cat((first, second), dim=1).gather(1, source.clamp(max=extent - 1))


def _encoder(config: Mapping[str, Any], up_layers: int) -> UpsampleConformerEncoder:
    sizes = config["encoder"]
    return UpsampleConformerEncoder(
        sizes["input_size"],
        sizes["output_size"],
        sizes["attention_heads"],
        sizes["linear_units"],
        sizes["num_blocks"],
        up_layers,
        config["pre_lookahead_len"],
        config["token_mel_ratio"],
        sizes["static_chunk_size"],
    )


def _estimator(sizes: Mapping[str, Any]) -> CausalConditionalDecoder:
    if len(sizes["channels"]) != 1:
        raise CheckpointError(
            f"the estimator has channels {sizes['channels']}; only one width is supported, as in CosyVoice 2."
        )
    return CausalConditionalDecoder(
        sizes["in_channels"],
        sizes["out_channels"],
        sizes["channels"][0],
        sizes["num_heads"],
        sizes["attention_head_dim"],
        sizes["n_blocks"],
        sizes["num_mid_blocks"],
    )


def _up_layers(state: Mapping[str, Tensor]) -> int:
    # The configuration has no key for the layers after upsampling.
    matches = (re.match(r"encoder\.up_encoders\.(\d+)\.", key) for key in state)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
