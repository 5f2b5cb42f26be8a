"""The language model of a checkpoint, whichever family it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3
from cosytriton_export.llm_base import LanguageModel
from cosytriton_export.llm_qwen2 import CosyVoice3LM, Qwen2LM
from cosytriton_export.llm_transformer import TransformerLM

if TYPE_CHECKING:
    from cosytriton_export.checkpoint import Checkpoint

BUILDERS: Mapping[str, Callable[[Checkpoint], LanguageModel]] = {
    COSYVOICE1.name: TransformerLM.from_checkpoint,
    COSYVOICE2.name: Qwen2LM.from_checkpoint,
    COSYVOICE3.name: CosyVoice3LM.from_checkpoint,
}


def language_model_of(checkpoint: Checkpoint) -> LanguageModel:
    """Build the language model of a checkpoint directory.

    Raises `CheckpointError`: its weights or its configuration do not describe its family's model.
    """
    return BUILDERS[checkpoint.family.name](checkpoint)
