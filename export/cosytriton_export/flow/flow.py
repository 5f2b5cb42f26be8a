"""The flow stage: speech tokens, reference and speaker to mel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_export.flow.masks import attention_bias, length_mask
from cosytriton_export.flow.solver import ConditionalFlow, Estimator
from cosytriton_export.weights import load_weights


class TokenFlow(nn.Module, ABC):
    """What every family's flow has: token embedding, speaker projection, and the solver."""

    def __init__(self, config: Mapping[str, Any], estimator: Estimator) -> None:
        super().__init__()
        mel_bins = config["output_size"]
        self.input_embedding = nn.Embedding(config["vocab_size"], config["input_size"])
        self.spk_embed_affine_layer = nn.Linear(config["spk_embed_dim"], mel_bins)
        guidance = config["decoder"]["cfm_params"]["content"]["inference_cfg_rate"]
        self.decoder = ConditionalFlow(estimator, mel_bins, guidance)

    @classmethod
    @abstractmethod
    def build(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Self:
        """Make the modules, of the sizes in the configuration and, where it is silent, in the state dict.

        Raises `CheckpointError`: the configuration is not one of this family.
        """

    @classmethod
    def from_config(cls, config: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Self:
        """Build from the `flow` part of the configuration and a state dict that came from `source`.

        Raises `CheckpointError`: weights and configuration do not fit each other, or not this family.
        """
        flow = cls.build(config, state)
        load_weights(flow, state, source)
        flow.decoder.fix_times()
        return flow.eval()

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, S] to [B, S, D]; ids outside the vocabulary, which pad, to its ends."""
        embedded: Tensor = self.input_embedding(ids.clamp(0, self.input_embedding.num_embeddings - 1))
        return embedded

    def speaker(self, embedding: Tensor) -> Tensor:
        """Speaker embedding [B, speaker width] to the estimator's [B, M]."""
        speaker: Tensor = self.spk_embed_affine_layer(F.normalize(embedding, dim=1))
        return speaker


class CausalFlow(TokenFlow):
    """What the flows of CosyVoice 2 and 3 share, for a batch of requests of any length and mode.

    A family adds `encode` and the estimator. CosyVoice 2, arXiv 2412.10117.
    """

    def __init__(self, config: Mapping[str, Any], estimator: Estimator) -> None:
        super().__init__(config, estimator)
        self.stride: int = config["token_mel_ratio"]  # mel frames per token
        self.lookahead: int = config["pre_lookahead_len"]  # tokens
        self.block: int = config["decoder"]["estimator"]["static_chunk_size"]  # frames of the block mask

    @abstractmethod
    def encode(self, ids: Tensor, given: Tensor, count: Tensor, streaming: Tensor) -> Tensor:
        """Estimate the mel from the tokens alone.

        Args:
            ids: token ids [B, S]; any id beyond the vocabulary is padding.
            given: tokens of each row, int64 [B, 1].
            count: tokens that get frames, int64 [B, 1]; those between `count` and `given` are only heard
                as lookahead of the ones before them.
            streaming: whether the row has the block mask, bool [B, 1].

        The estimate is [B, M, stride * S] and meaningless beyond `stride * count`.
        """

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
        stride = self.stride
        prompt_count, given = prompt_token_count.long(), (prompt_token_count + token_count).long()
        count = given - torch.where(finalize, 0, self.lookahead)
        ids = join_rows(prompt_tokens.long(), prompt_count, tokens.long())
        mu = self.encode(ids, given, count, streaming)  # [B, M, T], T = stride * (P + N)
        extent = mu.shape[2]
        prompt = self.prompt(prompt_mel, prompt_count * stride, extent)
        bias = attention_bias(count * stride, streaming, self.block, extent)
        mel = self.decoder(mu, self.speaker(speaker_embedding), prompt, bias).transpose(1, 2)

        frames, frame_count = tokens.shape[1] * stride, (count - prompt_count).clamp(min=0) * stride
        index = torch.arange(frames, device=mel.device) + prompt_count * stride  # [B, frames]
        return take(mel, index, frame_count), frame_count.int()

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


def take(x: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """Frames `index` [B, K] of x [B, T, M], zero beyond the first `count` [B, 1]; returns [B, K, M]."""
    inside = index.clamp(0, x.shape[1] - 1)
    taken = x.gather(1, inside[..., None].expand(-1, -1, x.shape[2]))
    return taken * length_mask(count, index.shape[1])[..., None]
