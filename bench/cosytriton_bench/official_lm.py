"""The language model of CosyVoice 2 and 3 as the official code runs it: Hugging Face's Qwen2.

Official: `Qwen2Encoder` and `Qwen2LM` (transformers 4.51.3). Each call computes Qwen2's own text head too,
151,936 rows that nothing uses, and concatenates its key-value cache (`DynamicCache`) anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosytriton_bench.errors import BenchError
from cosytriton_bench.torch_lm import TorchLM
from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.checkpoint import Checkpoint

TRANSFORMERS = "4.51.3"  # what the official requirements pin
_QWEN = "llm.model."


class OfficialLM(TorchLM):
    """Qwen2ForCausalLM with the weights of a checkpoint, fed with embeddings.

    Args:
        checkpoint: Of CosyVoice 2 or 3.

    Raises:
        BenchError: It is another family's, or another version of transformers is installed.

    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.family == COSYVOICE1:
            raise BenchError(
                "The benchmark's baseline knows CosyVoice 2 and 3; give one of their checkpoints."
            )
        state = checkpoint.state("llm")
        self._qwen = _qwen(checkpoint, state)
        self.text_rows = self._qwen.get_input_embeddings().num_embeddings
        marks = [state[key] for key in ("llm_embedding.weight",) if key in state]  # none in CosyVoice 3
        self._speech = torch.cat([state["speech_embedding.weight"], *marks])
        self._head = (state["llm_decoder.weight"], state.get("llm_decoder.bias"))
        self.speech_rows = len(self._head[0])
        # The official code keeps the default of transformers, "sdpa".
        attention = self._qwen.config._attn_implementation
        self.about = f"language model: Qwen2ForCausalLM of transformers {TRANSFORMERS}, its head, {attention}"

    def run(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """See `TorchLM`."""
        embedded = self._embed(ids)
        past = 0 if cache is None else cache.get_seq_length()
        mask = torch.ones(len(ids), past + ids.shape[1], dtype=torch.bool)
        answer = self._qwen(
            inputs_embeds=embedded,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            return_dict=True,
        )
        last = answer.hidden_states[-1][:, -1]
        return torch.nn.functional.linear(last, *self._head), answer.past_key_values

    def cache(self, rows: int, positions: int) -> Any:
        """See `TorchLM`."""
        from transformers import DynamicCache

        config, cache = self._qwen.config, DynamicCache()
        head = config.hidden_size // config.num_attention_heads
        shape = (rows, config.num_key_value_heads, positions, head)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache

    def _embed(self, ids: Tensor) -> Tensor:
        embed, text = torch.nn.functional.embedding, ids.clamp(max=self.text_rows - 1)
        by_text = self._qwen.get_input_embeddings()(text)
        by_speech = embed((ids - self.text_rows).clamp(min=0), self._speech)
        return torch.where((ids < self.text_rows)[..., None], by_text, by_speech)


def _qwen(checkpoint: Checkpoint, state: dict[str, Tensor]) -> Any:
    import transformers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if transformers.__version__ != TRANSFORMERS:
        raise BenchError(
            f"transformers {transformers.__version__} is installed, the official code runs {TRANSFORMERS}. "
            f"Install it into a folder of its own (`make bench` does) and name that with --official."
        )
    transformers.logging.set_verbosity_error()
    own = {key.removeprefix(_QWEN): value for key, value in state.items() if key.startswith(_QWEN)}
    config = Qwen2Config(**dict(checkpoint.qwen_config))
    config.vocab_size = len(own["model.embed_tokens.weight"])
    model, loading = Qwen2ForCausalLM.from_pretrained(
        None, config=config, state_dict=own, output_loading_info=True
    )
    strange = {kind: keys for kind, keys in loading.items() if keys}
    if strange:
        raise BenchError(f"{checkpoint.path}: the weights do not fit Qwen2ForCausalLM: {strange}.")
    return model.eval()
