"""A request to speak: read from its tensors, checked, and ready to be worked on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.modes import Ask, Plan, plan
from cosytriton_ensemble.pipeline import MAX_REFERENCE_SECONDS, MAX_SPEED, MIN_SPEED, pipeline_of
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.text import Markup
from cosytriton_ensemble.voice import NO_TOKENS, Voice


class Voices(Protocol):
    """Where voices are found by name; `cosytriton_ensemble.registry` has the real ones."""

    def get(self, name: str) -> Voice:
        """The voice; InputError when there is none of this name."""


@dataclass(frozen=True, slots=True, eq=False)
class Utterance:
    """A request to speak, or to convert a recording."""

    plan: Plan
    voice: Voice
    text: str  # "" in a conversion, or when the text comes by pieces
    source: Array  # INT32 [n], speech tokens to convert
    speed: float
    seed: int
    max_tokens: int | None
    normalise: bool
    markup: Markup  # "keep": tags are handed to the model
    official: bool  # behave like the official code where this kit differs and a user can notice it


def read_utterance(feed: Feed, family: Family, voices: Voices, checkpoint: str) -> Utterance:
    """Read a request's tensors, without batch dimension; InputError says what cannot be spoken and why."""
    voice, name = _voice(feed, voices, checkpoint), text_of(feed, names.VOICE_NAME)
    voice = voice.checked(family)
    source = _source(feed, family)
    transcript = text_of(feed, names.PROMPT_TEXT) or (voice.transcript if name else "")
    ask = Ask(
        mode=text_of(feed, names.MODE),
        text=names.TEXT in feed or names.TEXT_STREAM in feed,
        transcript=transcript,
        instruction=text_of(feed, names.INSTRUCT_TEXT),
        reference=voice.has_reference,
        source=source.size > 0,
    )
    return Utterance(
        plan(family, ask),
        voice,
        text_of(feed, names.TEXT),
        source,
        _speed(feed),
        int(number_of(feed, names.SEED, 0)),
        max_tokens_of(feed),
        bool(number_of(feed, names.NORMALISE, 1)),
        "keep" if number_of(feed, names.KEEP_MARKUP, 0) else "strip",
        bool(number_of(feed, names.OFFICIAL, 0)),
    )


def text_of(feed: Feed, name: str) -> str:
    """A text of the request, "" when it is absent; InputError when it is not UTF-8."""
    if name not in feed:
        return ""
    raw: bytes = feed[name][0]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"The input {name!r} is not UTF-8 (byte {error.start}); send UTF-8.") from error


def number_of(feed: Feed, name: str, default: float) -> float:
    """A number of the request."""
    return feed[name][0].item() if name in feed else default


def _voice(feed: Feed, voices: Voices, checkpoint: str) -> Voice:
    if name := text_of(feed, names.VOICE_NAME):
        if names.SPEAKER_EMBEDDING in feed:
            raise InputError(f"The request has a voice and names another ({name!r}); give one of them.")
        return voices.get(name)
    encoded_by = text_of(feed, names.CHECKPOINT)
    if encoded_by and encoded_by != checkpoint:
        raise InputError(
            f"The voice was encoded with another checkpoint ({encoded_by[:24]}…, this server has "
            f"{checkpoint[:24]}…): its tokens mean other sounds here. Encode it again with this server."
        )
    return Voice.from_feed(feed)


def _source(feed: Feed, family: Family) -> Array:
    if names.SOURCE_TOKENS not in feed:
        return NO_TOKENS
    given, longest = feed[names.SOURCE_TOKENS], pipeline_of(family).prompt_tokens.max
    count = int(number_of(feed, names.SOURCE_TOKEN_COUNT, len(given)))
    if not 1 <= count <= min(len(given), longest):
        raise InputError(
            f"{names.SOURCE_TOKENS} has {count} of {len(given)} ids; allowed are 1 to {longest}, which are "
            f"{MAX_REFERENCE_SECONDS} s. Convert a longer recording in parts."
        )
    tokens = given[:count]
    if not 0 <= tokens.min() <= tokens.max() < family.speech_codes:
        raise InputError(
            f"{names.SOURCE_TOKENS} holds the ids {tokens.min()} to {tokens.max()}; allowed are 0 to "
            f"{family.speech_codes - 1}. Take what voice_encoder gives."
        )
    return tokens


def _speed(feed: Feed) -> float:
    speed = number_of(feed, names.SPEED, 1.0)
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise InputError(f"{names.SPEED} is {speed:g}; allowed are {MIN_SPEED} to {MAX_SPEED}.")
    return float(np.float32(speed))


def max_tokens_of(feed: Feed) -> int | None:
    """The limit of speech tokens that a request sets, if it does; InputError when it is below 1."""
    if names.MAX_TOKENS not in feed:
        return None
    limit = int(number_of(feed, names.MAX_TOKENS, 0))
    if limit < 1:
        raise InputError(f"{names.MAX_TOKENS} is {limit}; give 1 or more, or leave it out.")
    return limit
