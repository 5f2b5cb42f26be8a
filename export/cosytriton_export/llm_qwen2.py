"""The language models of CosyVoice 2 and 3: Qwen2 over text, speech and marks in one id space.

Sources: CosyVoice 2, arXiv 2412.10117, and CosyVoice 3, arXiv 2505.17589. The official prompt is `[sos]
prompt_text text [task] prompt_speech`, and each decoded speech token is fed back by its embedding.
Attributes carry the official key names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cosytriton_export.errors import CheckpointError
from cosytriton_export.llm_base import MARKS, Decoding, IdSpace, LanguageModel
from cosytriton_export.qwen2 import Backbone, Qwen2Config
from cosytriton_export.weights import load_weights

if TYPE_CHECKING:
    from cosytriton_export.checkpoint import Checkpoint

UNUSED_KEYS = ("llm.model.lm_head.weight",)
"""Qwen2's text head, tied to its embeddings: speech has a head of its own."""

_EMBED_TOKENS = "llm.model.model.embed_tokens.weight"
_SPEECH_EMBEDDING = "speech_embedding.weight"


class Qwen2LM(LanguageModel):
    """CosyVoice 2: the marks have a table of their own, and the output has a bias."""

    BACKBONE: ClassVar[str] = "llm.model.model"
    SPECIAL_ROWS: ClassVar[int] = 3  # speech rows behind the codes up to the fill token

    def __init__(self, sizes: Qwen2Config, ids: IdSpace, decoding: Decoding) -> None:
        super().__init__(ids, decoding, sizes.cache)
        self.sizes = sizes
        self.llm = nn.ModuleDict({"model": nn.ModuleDict({"model": Backbone(sizes, ids.text_rows)})})
        self.speech_embedding = nn.Embedding(ids.speech_rows, sizes.hidden_size)
        self._add_marks_and_output()

    def _add_marks_and_output(self) -> None:
        self.llm_embedding = nn.Embedding(MARKS, self.sizes.hidden_size)
        self.llm_decoder = nn.Linear(self.sizes.hidden_size, self.ids.speech_rows)

    @staticmethod
    def id_space(text_rows: int, codes: int, rows: int) -> IdSpace:
        """Number text, speech and marks."""
        return IdSpace.cosyvoice2(text_rows, codes, rows)

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
        text_rows, rows = (len(state.get(key, ())) for key in (_EMBED_TOKENS, _SPEECH_EMBEDDING))
        codes: int = llm_config["speech_token_size"]
        ids = cls.id_space(text_rows, codes, rows)
        model = cls(Qwen2Config.from_json(qwen_config), ids, Decoding.from_config(llm_config))
        load_weights(model, state, source, UNUSED_KEYS)
        if rows < codes + cls.SPECIAL_ROWS:
            raise CheckpointError(
                f"{source}: the yaml's speech_token_size is {codes} and speech_embedding has {rows} rows. "
                f"It must have {cls.SPECIAL_ROWS} more than there are speech tokens, to end the speech."
            )
        return model.eval()

    def embedding_table(self) -> Tensor:
        """Stack the rows of the id space: text, speech and marks [ids, hidden]."""
        embed_tokens = self.get_submodule(self.BACKBONE).get_submodule("embed_tokens")
        tables = (embed_tokens, self.speech_embedding, *self._mark_tables())
        return torch.cat([table.get_parameter("weight") for table in tables])

    def _mark_tables(self) -> tuple[nn.Module, ...]:
        return (self.llm_embedding,)


class CosyVoice3LM(Qwen2LM):
    """CosyVoice 3: the marks are rows of the speech table, and the output has no bias."""

    SPECIAL_ROWS: ClassVar[int] = 4

    def _add_marks_and_output(self) -> None:
        self.llm_decoder = nn.Linear(self.sizes.hidden_size, self.ids.speech_rows, bias=False)

    @staticmethod
    def id_space(text_rows: int, codes: int, rows: int) -> IdSpace:
        """Number text and speech."""
        return IdSpace.cosyvoice3(text_rows, codes, rows)

    def _mark_tables(self) -> tuple[nn.Module, ...]:
        return ()
