"""`text_frontend`: transcript and text -> text token ids of the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_ensemble.models.requests import answer, string
from cosytriton_ensemble.pipeline import (
    PROMPT_TEXT,
    PROMPT_TEXT_COUNT,
    TEXT_FRONTEND,
    TEXT_INPUT,
    TEXT_TOKENS,
)
from cosytriton_ensemble.repository import TOKENIZER
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.text import TextFrontend


class TritonPythonModel:
    """Holds the tokenizer."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that the export wrote."""
        self._frontend = TextFrontend(Path(args["model_repository"]) / args["model_version"] / TOKENIZER)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return answer(requests, TEXT_FRONTEND, self._tokens)

    def _tokens(self, feed: Feed) -> Feed:
        text = self._frontend.tokens(string(feed, TEXT_INPUT.name), "text")
        prompt = self._frontend.tokens(string(feed, PROMPT_TEXT.name), "transcript of the reference audio")
        return {
            TEXT_TOKENS.name: np.array(prompt + text, np.int32),
            PROMPT_TEXT_COUNT.name: np.array([len(prompt)], np.int32),
        }
