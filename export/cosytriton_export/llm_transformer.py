"""The language model of CosyVoice 1: a causal text encoder, and a decoder over its output and speech.

Source: CosyVoice, arXiv 2407.05407. The official prompt is `[sos] [speaker] text [task] prompt_speech`, where
the text has gone through the encoder and the speaker is left out where none is given. Attributes carry the
official key names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow.conformer import ConformerEncoder
from cosytriton_export.kv_cache import CacheShape, causal_bias
from cosytriton_export.llm_base import MARKS, Decoding, IdSpace, LanguageModel
from cosytriton_export.relative_transformer import RelativeDecoder
from cosytriton_export.weights import load_weights

if TYPE_CHECKING:
    from cosytriton_export.checkpoint import Checkpoint


class TransformerLM(LanguageModel):
    """CosyVoice 1: text and speaker come as embeddings, speech and marks as ids."""

    BACKBONE: ClassVar[str] = "llm"

    def __init__(self, config: Mapping[str, Any], ids: IdSpace, decoding: Decoding) -> None:
        encoder, decoder = _sizes(config["text_encoder"]), _sizes(config["llm"])
        head_dim = decoder["width"] // decoder["heads"]
        super().__init__(ids, decoding, CacheShape(decoder["layers"], decoder["heads"], head_dim))
        self.width = decoder["inputs"]
        self.speaker_width: int = config["spk_embed_dim"]
        self.text_embedding = nn.Embedding(ids.text_rows, encoder["inputs"])
        self.text_encoder = ConformerEncoder(**encoder)
        self.text_encoder_affine_layer = nn.Linear(encoder["width"], self.width)
        self.spk_embed_affine_layer = nn.Linear(self.speaker_width, self.width)
        self.llm_embedding = nn.Embedding(MARKS, self.width)
        self.speech_embedding = nn.Embedding(ids.speech_codes, self.width)
        self.llm = RelativeDecoder(**decoder)
        self.llm_decoder = nn.Linear(decoder["width"], ids.speech_rows)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Build the language model of a checkpoint directory.

        Raises `CheckpointError`: its weights or its configuration do not describe this model.
        """
        return cls.from_state(
            checkpoint.config["llm"], checkpoint.state("llm"), str(checkpoint.path / "llm.pt")
        )

    @classmethod
    def from_state(cls, llm_config: Mapping[str, Any], state: Mapping[str, Tensor], source: str) -> Self:
        """Build the language model from the yaml's `llm` part and the weights; `source` names the weights.

        Raises `CheckpointError`: a size is missing or impossible, or a weight missing, unknown or misshapen.
        """
        ids = IdSpace.cosyvoice1(llm_config["text_token_size"], llm_config["speech_token_size"])
        model = cls(llm_config, ids, Decoding.from_config(llm_config))
        load_weights(model, state, source)
        return model.eval()

    def embedding_table(self) -> Tensor:
        """Stack the rows of the id space: speech and marks [ids, width]."""
        return torch.cat([self.speech_embedding.weight, self.llm_embedding.weight])


class PromptEncoder(nn.Module):
    """The parts of a prompt that have no ids: text and speaker, in the width of the decoder's input."""

    def __init__(self, model: TransformerLM) -> None:
        super().__init__()
        self.text_embedding, self.text_encoder = model.text_embedding, model.text_encoder
        self.text_encoder_affine_layer = model.text_encoder_affine_layer
        self.spk_embed_affine_layer = model.spk_embed_affine_layer

    def forward(self, text_ids: Tensor, speaker_embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Encode text_ids INT32 [B, T] to [B, T, width] and speaker_embedding [B, 192] to [B, 1, width].

        Only a speaker's direction counts. Zeros stand for no speaker; then the second output is to be left
        out of the prompt.
        """
        tokens = text_ids.shape[1]
        mask = causal_bias(torch.arange(tokens)[None], tokens)  # each token hears itself and those before it
        text = self.text_encoder(F.embedding(text_ids, self.text_embedding.weight), mask)
        speaker = self.spk_embed_affine_layer(F.normalize(speaker_embedding, dim=1))
        return self.text_encoder_affine_layer(text), speaker[:, None]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Take the sizes of a stack of layers from its part of the yaml."""
    width, heads = config["output_size"], config["attention_heads"]
    if width % heads or config["static_chunk_size"] != 1:
        raise CheckpointError(
            f"the yaml's llm part has output_size {width}, attention_heads {heads} and static_chunk_size "
            f"{config['static_chunk_size']}; the width must be a multiple of the heads, the chunk size 1."
        )
    return {
        "inputs": config["input_size"],
        "width": width,
        "heads": heads,
        "hidden": config["linear_units"],
        "layers": config["num_blocks"],
    }
