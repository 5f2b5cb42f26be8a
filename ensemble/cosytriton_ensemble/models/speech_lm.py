"""`speech_lm`: the language model for all requests; each gets its speech tokens as they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.errors import CancelledError, CosytritonError, InputError
from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.metrics import ACTIVE_SLOTS
from cosytriton_ensemble.models.requests import Gauge, Sender, read, scalar, string
from cosytriton_ensemble.pipeline import (
    CANCEL,
    MAX_TOKENS,
    PROMPT_TEXT_COUNT,
    PROMPT_TOKEN_COUNT,
    PROMPT_TOKEN_IDS,
    REQUEST_KEY,
    SEED,
    SPEECH_LM,
    TEXT_TOKENS,
    TOKEN_IDS,
    TOKENS,
)
from cosytriton_ensemble.spec import Feed


class TritonPythonModel:
    """Hands requests to the engine, and lets a second request cancel a first by its key."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph and start the engine."""
        settings = {
            k: int(v["string_value"]) for k, v in json.loads(args["model_config"])["parameters"].items()
        }
        path = Path(args["model_repository"]) / args["model_version"] / DEFAULT_MODEL
        threads, slots = settings["intra_op_thread_count"], settings["slots"]
        self._engine = LlmEngine(
            LanguageModel.open(path, threads=threads, rows=slots),
            max_waiting=settings["max_waiting"],
            max_tokens=TOKENS.max,
        )
        self._keyed: dict[str, _Answer] = {}
        self._gauge = Gauge(ACTIVE_SLOTS, "Requests that take part in the language model's steps", SPEECH_LM)

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests and return; the engine's thread answers."""
        for request in requests:
            sender = Sender(request)
            with sender.guard():
                self._take(read(request, SPEECH_LM), sender)

    def finalize(self) -> None:
        """End the engine."""
        self._engine.close()
        self._gauge.close()

    def _take(self, feed: Feed, sender: Sender) -> None:
        key = string(feed, REQUEST_KEY.name)
        if CANCEL.name in feed and feed[CANCEL.name][0]:
            if running := self._keyed.get(key):
                running.abandoned = True
            sender.end()
            return
        answer = _Answer(sender, self, key)
        self._engine.submit(_speech_request(feed), answer)
        if key:
            self._keyed[key] = answer

    def ended(self, key: str) -> None:
        """Forget a request."""
        self._keyed.pop(key, None)
        self.report()

    def report(self) -> None:
        """Publish how many requests are active."""
        self._gauge.set(self._engine.stats().active)


class _Answer:
    """The engine's listener for one request."""

    def __init__(self, sender: Sender, model: TritonPythonModel, key: str) -> None:
        self.abandoned = False  # set by a request to cancel
        self._sender, self._model, self._key = sender, model, key
        self._reported = False

    def on_token(self, token: int) -> None:
        self._sender.send({TOKEN_IDS.name: np.array([token], np.int32)})
        if not self._reported:
            self._model.report()
            self._reported = True

    def on_end(self, error: CosytritonError | None) -> None:
        self._model.ended(self._key)
        # Who cancelled knows it.
        self._sender.end(None if isinstance(error, CancelledError) else error)

    def cancelled(self) -> bool:
        return self.abandoned or self._sender.is_cancelled()


def _speech_request(feed: Feed) -> SpeechRequest:
    max_tokens = scalar(feed, MAX_TOKENS.name, TOKENS.max)
    if max_tokens < 1:
        raise InputError(f"{MAX_TOKENS.name} is {max_tokens}; give 1 to {TOKENS.max}, or leave it out.")
    return SpeechRequest(
        text=feed[TEXT_TOKENS.name].tolist(),
        prompt_text_count=scalar(feed, PROMPT_TEXT_COUNT.name),
        prompt_speech=feed[PROMPT_TOKEN_IDS.name][: scalar(feed, PROMPT_TOKEN_COUNT.name)].tolist(),
        seed=scalar(feed, SEED.name) % 2**63,
        max_tokens=max_tokens,
    )
