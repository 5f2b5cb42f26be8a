"""`text_frontend`: transcript and text -> token ids of the transcript and of each piece to speak."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.models.requests import answer
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.text import Markup, TextFrontend
from cosytriton_ensemble.utterance import number_of, text_of


class TritonPythonModel:
    """Holds the tokenizer and the normaliser."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that the export wrote."""
        setting = Setting.of(args)
        self._stage = setting.pipeline.text_frontend
        self._frontend = TextFrontend(setting.tokenizer, max_characters=setting.number("max_characters"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return answer(requests, self._stage, self._tokens)

    def _tokens(self, feed: Feed) -> Feed:
        normalise = bool(number_of(feed, names.NORMALISE, 1))
        markup: Markup = "keep" if number_of(feed, names.KEEP_MARKUP, 0) else "strip"
        prompt = self._frontend.prompt(text_of(feed, names.PROMPT_TEXT), "transcript", normalise=normalise)
        pieces = self._frontend.segments(text_of(feed, names.TEXT), normalise=normalise, markup=markup)
        return {
            names.TEXT_TOKENS: np.array(prompt + [i for piece in pieces for i in piece], np.int32),
            names.PROMPT_TEXT_COUNT: np.array([len(prompt)], np.int32),
            names.PIECE_COUNTS: np.array([len(piece) for piece in pieces], np.int32),
        }
