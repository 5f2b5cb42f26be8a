"""A request to the language model, and its way from the prompt to the last speech token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from cosytriton_ensemble.errors import CancelledError, CosytritonError, InputError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.llm_spec import LanguageModelSpec, Prompt
from cosytriton_ensemble.sampling import FloatArray, Uniform
from cosytriton_ensemble.watchdog import SilenceFilter, Watchdog

logger = logging.getLogger(__name__)

# Speech tokens per text token within which the speech ends (official llm: min_/max_token_text_ratio).
MIN_TOKEN_RATIO = 2
MAX_TOKEN_RATIO = 20
SPEAKER_WIDTH = 192

FinishReason = Literal["end", "length", "repetition", "silence"]
"""Why speech is over: the model ended it, it grew too long, or it hung (`Watchdog`)."""

Outcome = FinishReason | CosytritonError


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What the language model is asked to say: ids are those of the text and of the speech vocabulary."""

    text: Sequence[int]  # text ids: the reference's transcript, then the text to speak
    prompt_text_count: int = 0  # how many of `text` are the transcript
    prompt_speech: Sequence[int] = ()  # speech ids of the reference
    seed: int = 0
    max_tokens: int | None = None  # ends the speech earlier than the text's length would
    speaker: FloatArray | None = None  # [192] speaker embedding (CosyVoice 1); zeros are none
    text_streaming: bool = False  # more text follows through the request's `TextInput`
    prefix_count: int = 0  # text_streaming: how many of `text` come before all blocks (CosyVoice 3)
    watchdog: bool = True  # end speech that hangs
    official_min_length: bool = False  # at first rule out no more than the official code does

    @property
    def has_speaker(self) -> bool:
        """Whether there is a speaker embedding."""
        return self.speaker is not None and bool(np.any(self.speaker))


@dataclass(frozen=True, slots=True)
class Setting:
    """What all requests of an engine share."""

    spec: LanguageModelSpec
    family: Family
    max_tokens: int  # speech tokens of a request
    max_positions: int  # of a sequence, prompt and speech together
    text_timeout: float  # seconds that a request may wait for its text
    wake: Callable[[], None]  # called when text has come or ended, in the thread that brought it


class Listener(Protocol):
    """Who waits for a request's tokens. The engine's thread calls it and waits: return at once."""

    def on_token(self, token: int) -> None:
        """Take a speech id, as soon as it is made."""

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        """Hear of the end, exactly once: why the speech is over, or the error that cut it short."""

    def cancelled(self) -> bool:
        """Tell whether the tokens are no longer wanted; asked before each step."""


class TextInput(Protocol):
    """How a request whose text is not yet complete (`SpeechRequest.text_streaming`) gets the rest.

    Any thread may call it. Once the request has ended it has no effect.
    """

    def push_text(self, ids: Sequence[int]) -> None:
        """Append text ids; InputError if the request takes none, or cannot speak as many."""

    def end_text(self) -> None:
        """Say that the text is complete; saying it again changes nothing."""


class PromptMaker(Protocol):
    """The part of a language model that lays out prompts."""

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        """Lay out what a request starts from."""


class Generation:
    """A request on its way; here one whose text is complete. The engine's thread drives it.

    Args:
        request: What to say.
        listener: Who hears it.
        uniform: The request's random source.
        setting: The model and what it allows.

    Raises:
        InputError: The request cannot be spoken.

    """

    waits = False
    """Whether the row must be fed what `take` gives before it takes part in steps again."""
    _least_target = 1
    _marks = 2  # positions of a sequence that are neither text nor speech

    def __init__(
        self, request: SpeechRequest, listener: Listener, uniform: Uniform, setting: Setting
    ) -> None:
        self._request, self._listener, self._uniform, self._setting = request, listener, uniform, setting
        spec, family = setting.spec, setting.family
        self._spec = spec
        self._text_count = len(request.text)
        self._marks += spec.text_encoder and request.has_speaker
        self._check_request()
        stops = {spec.official_min_length_id} if request.official_min_length else spec.stop_ids
        self._ruled_out = np.array(sorted(stops))  # before the minimum length
        self._filter = SilenceFilter(family.silent_tokens)
        self._watchdog = Watchdog(family.token_rate, family.silent_tokens) if request.watchdog else None
        self._first_sound = family.first_chunk(len(request.prompt_speech)) + family.lookahead
        self.tokens: list[int] = []

    # ---- what the engine does with it -------------------------------------------------------------------

    def prompt(self, model: PromptMaker) -> Prompt:
        """Lay out what a row starts from."""
        return model.prompt_of(self._request)

    def ready(self) -> bool:
        """Tell whether what the row is to be fed next is known."""
        return True

    def take(self) -> Prompt:
        """Take what the row is to be fed next; `waits` is over."""
        raise NotImplementedError

    @property
    def urgent(self) -> bool:
        """Whether its tokens do not suffice for a first sound yet."""
        return len(self.tokens) < self._first_sound

    @property
    def longest(self) -> int:
        """Positions that the row may come to hold."""
        return self._positions(self._text_count) + self._max_tokens()

    @property
    def last_id(self) -> int:
        """The unified id to feed in the next step."""
        return self._spec.speech_offset + self.tokens[-1] if self.tokens else self._spec.sos_id

    def advance(self, logits: FloatArray) -> FinishReason | None:
        """Draw the next token from logits [speech_rows] and hand it on; why the speech is over, if it is.

        The logits are overwritten.
        """
        if self._too_short():
            logits[self._ruled_out] = -np.inf
        token = self._spec.sampler.sample(logits, self.tokens, self._uniform)
        return "end" if token in self._spec.stop_ids else self._emit(token)

    def lost(self) -> CosytritonError | None:
        """Tell why the request cannot go on, if it cannot."""
        try:
            cancelled = self._listener.cancelled()
        except Exception:
            logger.exception("A listener failed when asked whether it is cancelled.")
            cancelled = True  # it has gone
        return CancelledError("The request was cancelled.") if cancelled else None

    def end(self, outcome: Outcome) -> None:
        """Tell the listener."""
        failed = isinstance(outcome, CosytritonError)
        try:
            self._listener.on_end(*((outcome, None) if failed else (None, outcome)))
        except Exception:
            logger.exception("A listener failed at the end of its request.")

    # ---- TextInput --------------------------------------------------------------------------------------

    def push_text(self, ids: Sequence[int]) -> None:
        """Refuse: the text was complete from the start."""
        raise InputError(f"{len(ids)} text ids came late: the request's text_streaming is false.")

    def end_text(self) -> None:
        """Do nothing: the text was complete from the start."""

    # ---- limits -----------------------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """How many text tokens are to be spoken."""
        return self._text_count - self._request.prompt_text_count

    def _too_short(self) -> bool:
        return len(self.tokens) < self.target * MIN_TOKEN_RATIO

    def _emit(self, token: int) -> FinishReason | None:
        self.tokens.append(token)
        if self._filter.passes(token):
            self._listener.on_token(token)
        if len(self.tokens) >= self._max_tokens():
            return "length"
        return self._watchdog.observe(token) if self._watchdog else None

    def _max_tokens(self) -> int:
        return min(self.target * MAX_TOKEN_RATIO, self._allowed())

    def _allowed(self) -> int:
        """Speech tokens that fit and are wanted."""
        wanted, room = self._request.max_tokens, self._room(self._text_count)
        return room if wanted is None else min(room, wanted)

    def _positions(self, text_count: int) -> int:
        """Positions of a sequence without its new speech."""
        return self._marks + text_count + len(self._request.prompt_speech)

    def _room(self, text_count: int) -> int:
        """Speech tokens that fit behind so much text."""
        return min(self._setting.max_tokens, self._setting.max_positions - self._positions(text_count))

    def _check_room(self, text_count: int) -> None:
        target, room = text_count - self._request.prompt_text_count, self._room(text_count)
        if room < target * MIN_TOKEN_RATIO:
            raise InputError(
                f"A text of {target} tokens needs {target * MIN_TOKEN_RATIO} speech tokens or more, but "
                f"after a prompt of {self._positions(text_count)} positions there is room for {room}. "
                "Split the text."
            )

    def _check_request(self) -> None:
        request, spec = self._request, self._spec
        check_ids("text", request.text, spec.text_rows)
        check_ids("prompt speech", request.prompt_speech, spec.speech_codes)
        if request.speaker is not None and request.speaker.shape != (SPEAKER_WIDTH,):
            raise InputError(
                f"The speaker embedding has the shape {list(request.speaker.shape)}; it must be "
                f"[{SPEAKER_WIDTH}]."
            )
        if self.target < self._least_target or request.prompt_text_count < 0:
            raise InputError(
                f"The text has {self._text_count} tokens, of which {request.prompt_text_count} are the "
                "reference's transcript: nothing is left to speak. Give a text."
            )
        self._check_room(self._text_count)


def check_ids(what: str, ids: Sequence[int], limit: int) -> None:
    """Raise InputError unless all ids are 0 to `limit` - 1."""
    wrong = [i for i in ids if not 0 <= i < limit]
    if wrong:
        raise InputError(f"The {what} holds the ids {wrong[:5]}; they must be 0 to {limit - 1}.")
