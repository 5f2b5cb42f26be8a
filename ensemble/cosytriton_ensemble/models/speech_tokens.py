"""`speech_tokens`: collects `speech_lm` for the ensemble `tts`, which speaks a text in one piece."""

from __future__ import annotations

import numpy as np

from cosytriton_ensemble.errors import GenerationError
from cosytriton_ensemble.models.concurrent import ConcurrentModel
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.pipeline import (
    COSYVOICE2,
    FINALIZE,
    NOISE_OFFSET,
    PROMPT_TOKEN_COUNT,
    SOURCE_CACHE,
    SOURCE_CACHE_COUNT,
    SPEECH_LM,
    SPEECH_TOKENS,
    STREAMING,
    TOKEN_COUNT,
    TOKEN_IDS,
    TOKENS,
    USED_PROMPT_COUNT,
)
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.voice import used_prompt_count

WHOLE: Feed = {
    STREAMING.name: np.array([False]),
    FINALIZE.name: np.array([True]),
    SOURCE_CACHE.name: np.zeros(COSYVOICE2.overlap_samples, np.float32),
    SOURCE_CACHE_COUNT.name: np.array([0], np.int32),
    NOISE_OFFSET.name: np.array([0], np.int32),
}
"""What a text that is spoken in one piece means for the flow and the vocoder."""


class TritonPythonModel(ConcurrentModel):
    """Waits for the tokens of a request."""

    stage = SPEECH_TOKENS

    def answer(self, feed: Feed, sender: Sender, models: Loopback) -> None:
        """Answer with all tokens of one request."""
        used = np.array([used_prompt_count(feed)], np.int32)
        request = feed | {PROMPT_TOKEN_COUNT.name: used}
        parts = [response[TOKEN_IDS.name] for response in models.stream(SPEECH_LM, request)]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        counts = {TOKEN_COUNT.name: np.array([tokens.size], np.int32), USED_PROMPT_COUNT.name: used}
        sender.send(WHOLE | counts | {TOKEN_IDS.name: padded(tokens)}, final=True)


def padded(tokens: Array) -> Array:
    """Speech tokens [n] on the padding grid. GenerationError when there are none: silence is no speech."""
    if not tokens.size:
        raise GenerationError("The language model ended before its first speech token; try another seed.")
    return np.pad(tokens, (0, TOKENS.padded(tokens.size) - tokens.size))
