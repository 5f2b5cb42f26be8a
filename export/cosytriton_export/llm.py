"""CosyVoice 2's language model: text and prompt speech in, logits of the next speech token out.

Source: CosyVoice 2, arXiv 2412.10117. The official prompt is `[sos] prompt_text text [task] prompt_speech`,
and each decoded speech token is fed back by its embedding. Text, speech and the two marks share one id
space here (`IdSpace`), so that a prompt is one row of ids. Attributes carry the official key names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from cosytriton_export.errors import CheckpointError
from cosytriton_export.qwen2 import Backbone, Qwen2Config
from cosytriton_export.weights import load_weights

if TYPE_CHECKING:
    from cosytriton_export.checkpoint import Checkpoint

UNUSED_KEYS = ("llm.model.lm_head.weight",)
"""Qwen2's text head, tied to its embeddings: speech has a head of its own."""

BACKBONE = "model.model"
"""Where Qwen2 stands in the official `llm` attribute."""

_MARKS = 2  # rows of llm_embedding: start of sequence, and the mark between text and speech
_EMBED_TOKENS = "llm.model.model.embed_tokens.weight"
_SPEECH_EMBEDDING = "speech_embedding.weight"


@dataclass(frozen=True, slots=True)
class IdSpace:
    """One numbering of everything that can be embedded: text rows, then speech rows, then the marks."""

    text_rows: int
    speech_rows: int
    speech_codes: int

    @property
    def speech_offset(self) -> int:
        """Speech token s has the id `speech_offset + s`."""
        return self.text_rows

    @property
    def sos_id(self) -> int:
        """Start of sequence."""
        return self.text_rows + self.speech_rows

    @property
    def task_id(self) -> int:
        """The mark between the text and the speech."""
        return self.sos_id + 1

    @property
    def stop_ids(self) -> list[int]:
        """Outputs that end the speech; the first is the end of sequence that a minimum length suppresses."""
        return list(range(self.speech_codes, self.speech_rows))

    def prompt(self, text: Tensor, speech: Tensor) -> Tensor:
        """Join (prompt text and) text and prompt speech ids [batch, n] to a prompt [batch, 2 + sum of n]."""
        mark = text.new_ones(len(text), 1)
        return torch.cat([self.sos_id * mark, text, self.task_id * mark, self.speech_offset + speech], 1)


class LanguageModel(nn.Module):
    """Logits of the next speech token, for a prompt or for one fed-back token alike."""

    def __init__(self, sizes: Qwen2Config, ids: IdSpace, sampling: Mapping[str, float]) -> None:
        super().__init__()
        self.sizes, self.ids, self.sampling = sizes, ids, dict(sampling)
        self.llm = nn.ModuleDict({"model": nn.ModuleDict({"model": Backbone(sizes, ids.text_rows)})})
        self.llm_embedding = nn.Embedding(_MARKS, sizes.hidden_size)
        self.speech_embedding = nn.Embedding(ids.speech_rows, sizes.hidden_size)
        self.llm_decoder = nn.Linear(sizes.hidden_size, ids.speech_rows)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Build the language model of a checkpoint directory.

        Raises `CheckpointError`: its weights or its configuration do not describe this model.
        """
        config, state = checkpoint.config["llm"], checkpoint.state("llm")
        return cls.from_state(checkpoint.qwen_config, config, state, str(checkpoint.path / "llm.pt"))

    @classmethod
    def from_state(
        cls,
        qwen_config: Mapping[str, Any],
        llm_config: Mapping[str, Any],
        state: Mapping[str, Tensor],
        source: str,
    ) -> Self:
        """Build the language model from Qwen2's `config.json`, the yaml's `llm` part and the weights.

        Vocabulary sizes are those of the weights. `source` names the weights in errors.

        Raises `CheckpointError`: a size is missing, or a weight is missing, unknown or of another shape.
        """
        # A table that is missing is reported with all other keys by load_weights.
        text_rows, speech_rows = (len(state.get(key, ())) for key in (_EMBED_TOKENS, _SPEECH_EMBEDDING))
        ids = IdSpace(text_rows, speech_rows, llm_config["speech_token_size"])
        sampling = {name: llm_config["sampling"][name] for name in ("top_p", "top_k", "win_size", "tau_r")}
        model = cls(Qwen2Config.from_json(qwen_config), ids, sampling)
        load_weights(model, state, source, UNUSED_KEYS)
        if not ids.stop_ids:
            raise CheckpointError(
                f"{source}: the yaml's speech_token_size is {ids.speech_codes}, so none of the {speech_rows} "
                "rows of speech_embedding is left to end the speech. It must be smaller."
            )
        return model.eval()

    @property
    def backbone(self) -> Backbone:
        """The Qwen2 inside."""
        return cast(Backbone, self.llm.get_submodule(BACKBONE))

    def embedding_table(self) -> Tensor:
        """Stack the rows of the id space [text_rows + speech_rows + marks, hidden]."""
        tables = (self.backbone.embed_tokens, self.speech_embedding, self.llm_embedding)
        return torch.cat([table.weight for table in tables])

    def empty_caches(self, batch: int, capacity: int) -> list[Tensor]:
        """Make zeros [batch, kv_heads, capacity, head_dim] per layer; keys and values each need a list."""
        shape = (batch, self.sizes.num_key_value_heads, capacity, self.sizes.head_dim)
        return [torch.zeros(shape) for _ in range(self.sizes.num_hidden_layers)]

    def forward(
        self, x: Tensor, past_counts: Tensor, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Run new positions behind the cached ones.

        `x` are embeddings [batch, new, hidden], `past_counts` INT32 [batch] the positions that are already
        in the caches, and the caches one FP32 [batch, kv_heads, capacity, head_dim] per layer with
        past_counts + new <= capacity. Returns the state after the final norm [batch, new, hidden], the
        logits [batch, new, speech_rows] and the updated caches.
        """
        hidden, keys, values = self.backbone(x, past_counts, key_caches, value_caches)
        return hidden, self.llm_decoder(hidden), keys, values
