"""`speech_lm`: the language model for all requests; each gets its speech tokens as they are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.errors import CosytritonError, InputError
from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.metrics import ACTIVE_SLOTS
from cosytriton_ensemble.models.requests import Gauge, Sender, read, scalar
from cosytriton_ensemble.pipeline import (
    MAX_TOKENS,
    PROMPT_TEXT_COUNT,
    PROMPT_TOKEN_COUNT,
    PROMPT_TOKEN_IDS,
    SEED,
    SPEECH_LM,
    TEXT_TOKENS,
    TOKEN_IDS,
    TOKENS,
)
from cosytriton_ensemble.spec import Feed


class TritonPythonModel:
    """Hands requests to the engine."""

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
        self._gauge = Gauge(ACTIVE_SLOTS, "Requests that take part in the language model's steps", SPEECH_LM)

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests and return; the engine's thread answers."""
        for request in requests:
            sender = Sender(request)
            with sender.guard():
                self._engine.submit(_speech_request(read(request, SPEECH_LM)), _Answer(sender, self.report))

    def finalize(self) -> None:
        """End the engine."""
        self._engine.close()
        self._gauge.close()

    def report(self) -> None:
        """Publish how many requests are active."""
        self._gauge.set(self._engine.stats().active)


class _Answer:
    """The engine's listener for one request; `report` publishes the engine's state."""

    def __init__(self, sender: Sender, report: Callable[[], None]) -> None:
        self._sender, self._report = sender, report
        self._started = False

    def on_token(self, token: int) -> None:
        self._sender.send({TOKEN_IDS.name: np.array([token], np.int32)})
        if not self._started:
            self._started = True
            self._report()

    def on_end(self, error: CosytritonError | None) -> None:
        self._report()
        self._sender.end(error)

    def cancelled(self) -> bool:
        return self._sender.is_cancelled()


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
