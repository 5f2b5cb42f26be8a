"""A request to the language model, and its way from the prompt to the last speech token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosytriton_ensemble.errors import CosytritonError, InputError
from cosytriton_ensemble.language_model import LanguageModelSpec
from cosytriton_ensemble.sampling import FloatArray, Uniform

logger = logging.getLogger(__name__)

# Speech tokens per text token within which the speech ends (official llm: min_/max_token_text_ratio).
MIN_TOKEN_RATIO = 2
MAX_TOKEN_RATIO = 20


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What the language model is asked to say: ids are those of the text and of the speech vocabulary."""

    text: Sequence[int]  # text ids: the reference's transcript, then the text to speak
    prompt_text_count: int = 0  # how many of `text` are the transcript
    prompt_speech: Sequence[int] = ()  # speech ids of the reference
    seed: int = 0
    max_tokens: int | None = None  # ends the speech earlier than the text's length would


class Listener(Protocol):
    """Who waits for a request's tokens. The engine's thread calls it and waits: return at once."""

    def on_token(self, token: int) -> None:
        """Take a speech id, as soon as it is made."""

    def on_end(self, error: CosytritonError | None) -> None:
        """Hear of the end, exactly once: None when the speech is complete, else why it is not."""

    def cancelled(self) -> bool:
        """Tell whether the tokens are no longer wanted; asked before each step."""


class Generation:
    """A request on its way.

    Args:
        request: What to say.
        listener: Who hears it.
        uniform: The request's random source.
        spec: The model's vocabulary.
        max_tokens: The most speech tokens of any request.
        max_positions: The longest sequence, prompt and speech together.

    Raises:
        InputError: The request cannot be spoken.

    """

    def __init__(
        self,
        request: SpeechRequest,
        listener: Listener,
        uniform: Uniform,
        spec: LanguageModelSpec,
        max_tokens: int,
        max_positions: int,
    ) -> None:
        _check_ids("text", request.text, spec.speech_offset)
        _check_ids("prompt speech", request.prompt_speech, spec.speech_codes)
        target = len(request.text) - request.prompt_text_count
        if target < 1 or request.prompt_text_count < 0:
            raise InputError(
                f"The text has {len(request.text)} tokens, of which {request.prompt_text_count} are the "
                "reference's transcript: nothing is left to speak. Give a text."
            )
        self.prompt = spec.prompt(request.text, request.prompt_speech)
        room = min(max_tokens, max_positions - len(self.prompt))
        self._min_tokens = target * MIN_TOKEN_RATIO
        if room < self._min_tokens:
            raise InputError(
                f"A text of {target} tokens needs {self._min_tokens} speech tokens or more, but after a "
                f"prompt of {len(self.prompt)} positions there is room for {room}. Split the text."
            )
        wanted = room if request.max_tokens is None else request.max_tokens
        self._max_tokens = min(target * MAX_TOKEN_RATIO, room, wanted)
        self._spec, self._uniform, self._listener = spec, uniform, listener
        self.tokens: list[int] = []

    @property
    def last_id(self) -> int:
        """The unified id to feed next."""
        return self._spec.speech_offset + self.tokens[-1]

    def advance(self, logits: FloatArray) -> bool:
        """Draw the next token from logits [speech_rows] and hand it on; False when the speech is complete.

        The logits are overwritten.
        """
        if len(self.tokens) < self._min_tokens:
            logits[self._spec.eos_id] = -np.inf
        token = self._spec.sampler.sample(logits, self.tokens, self._uniform)
        if token in self._spec.stop_ids:
            return False
        self.tokens.append(token)
        self._listener.on_token(token)
        return len(self.tokens) < self._max_tokens

    def cancelled(self) -> bool:
        """Ask whether the listener has gone; one that cannot answer has."""
        try:
            return self._listener.cancelled()
        except Exception:
            logger.exception("A listener failed when asked whether it is cancelled.")
            return True

    def end(self, error: CosytritonError | None) -> None:
        """Tell the listener."""
        try:
            self._listener.on_end(error)
        except Exception:
            logger.exception("A listener failed at the end of its request.")


def _check_ids(what: str, ids: Sequence[int], limit: int) -> None:
    wrong = [i for i in ids if not 0 <= i < limit]
    if wrong:
        raise InputError(f"The {what} holds the ids {wrong[:5]}; they must be 0 to {limit - 1}.")
