"""`speech_tokens`: collects `speech_lm` for the ensemble `tts`, which speaks a text in one piece."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cosytriton_ensemble.errors import GenerationError
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.requests import ActiveRequests, Sender, read
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


class TritonPythonModel:
    """One thread for each request: it waits for tokens and computes nothing."""

    def initialize(self, args: dict[str, str]) -> None:  # noqa: ARG002  (Triton's signature)
        """Publish the gauge that tells when the server may stop."""
        self._active = ActiveRequests(SPEECH_TOKENS)
        self._models = Loopback()

    def finalize(self) -> None:
        """End the connection and free the gauge."""
        self._models.close()
        self._active.close()

    def execute(self, requests: list[Any]) -> None:
        """Return at once, so that requests do not wait for one another."""
        for request in requests:
            feed, sender = read(request, SPEECH_TOKENS), Sender(request)
            threading.Thread(target=self._collect, args=(feed, sender), daemon=True).start()

    def _collect(self, feed: Feed, sender: Sender) -> None:
        with self._active.counting():
            collect(feed, sender, self._models)


def collect(feed: Feed, sender: Sender, models: Loopback) -> None:
    """Answer with all tokens of one request."""
    with sender.guard():
        used = np.array([used_prompt_count(feed)], np.int32)
        parts = [
            part[TOKEN_IDS.name] for part in models.stream(SPEECH_LM, feed | {PROMPT_TOKEN_COUNT.name: used})
        ]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        sender.send(
            WHOLE
            | {
                TOKEN_IDS.name: padded(tokens),
                TOKEN_COUNT.name: np.array([tokens.size], np.int32),
                USED_PROMPT_COUNT.name: used,
            },
            final=True,
        )


def padded(tokens: Array) -> Array:
    """Speech tokens [n] on the padding grid. GenerationError when there are none: silence is no speech."""
    if not tokens.size:
        raise GenerationError("The language model ended before its first speech token; try another seed.")
    return np.pad(tokens, (0, TOKENS.padded(tokens.size) - tokens.size))
