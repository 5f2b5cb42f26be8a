"""Where the language model's text comes from: written at once, or arriving piece by piece."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import GenerationError, InputError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.models.loopback import Loopback, Responses
from cosytriton_ensemble.pipeline import MAX_CHARACTERS, MAX_TEXT_TOKENS, SPEAKER_SIZE, pipeline_of
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.text import TextFrontend
from cosytriton_ensemble.utterance import Utterance

TEXT_SECONDS = 25.0  # that a text may pause; the language model waits a little longer (`text_timeout`)
LONG_TOKENS = 80  # text tokens after which the end of a sentence ends a piece of streamed text


class TokenSource(Protocol):
    """Gives a request to the language model for each piece of text."""

    def __iter__(self) -> Iterator[Feed]: ...

    def started(self, responses: Responses) -> None:
        """Hear that the last request given is on its way."""

    def close(self) -> None:
        """Hear that no more is wanted; from any thread."""


@dataclass(slots=True)
class Requests:
    """Builds the requests of one utterance to the language model; piece n has the n-th seed."""

    utterance: Utterance
    family: Family
    pieces: int = 0

    def feed(self, prompt: list[int], text: list[int]) -> Feed:
        """Text ids of one piece, behind those of the transcript or instruction."""
        utterance, plan = self.utterance, self.utterance.plan
        voice = utterance.voice.feed(self.family, plan.lm_prompt)
        if not plan.lm_speaker:
            voice[names.SPEAKER_EMBEDDING] = np.zeros(SPEAKER_SIZE, np.float32)
        feed: Feed = voice | {
            names.PROMPT_TEXT_COUNT: np.array([len(prompt)], np.int32),
            names.SEED: np.array([(utterance.seed + self.pieces) % 2**63], np.int64),
            names.OFFICIAL: np.array([utterance.official]),
        }
        if prompt or text:
            feed[names.TEXT_TOKENS] = np.array(prompt + text, np.int32)
        if utterance.max_tokens is not None:
            feed[names.MAX_TOKENS] = np.array([utterance.max_tokens], np.int32)
        self.pieces += 1
        return feed


class WrittenText:
    """A text that is there: the front end cuts it into pieces."""

    def __init__(self, text: str, requests: Requests, models: Loopback) -> None:
        self._text, self._requests, self._models = text, requests, models

    def __iter__(self) -> Iterator[Feed]:
        utterance = self._requests.utterance
        words = {names.TEXT: self._text, names.PROMPT_TEXT: utterance.plan.prompt_text}
        feed: Feed = {name: np.array([text.encode()], np.object_) for name, text in words.items()}
        feed |= {
            names.NORMALISE: np.array([utterance.normalise]),
            names.KEEP_MARKUP: np.array([utterance.markup == "keep"]),
        }
        answer = self._models.call(pipeline_of(self._requests.family).text_frontend, feed)
        ids = answer[names.TEXT_TOKENS].tolist()
        start = int(answer[names.PROMPT_TEXT_COUNT][0])
        prompt = ids[:start]
        for count in answer[names.PIECE_COUNTS].tolist():
            yield self._requests.feed(prompt, ids[start : start + count])
            start += count

    def started(self, responses: Responses) -> None:
        """Nothing to add."""

    def close(self) -> None:
        """Nothing to end."""


class Inbox:
    """Pieces of a text, put in by one thread and taken out by another; `limit` is in characters."""

    def __init__(self, limit: int = MAX_CHARACTERS) -> None:
        self._arrived: SimpleQueue[str | None] = SimpleQueue()
        self._limit = self._left = limit

    def put(self, piece: str) -> None:
        """Add a piece; InputError when the text gets too long."""
        self._left -= len(piece)
        if self._left < 0:
            self.close()
            raise InputError(f"The text has more than {self._limit} characters; send it in several requests.")
        if piece:
            self._arrived.put(piece)

    def close(self) -> None:
        """End the text."""
        self._arrived.put(None)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                piece = self._arrived.get(timeout=TEXT_SECONDS)
            except Empty:
                raise GenerationError(
                    f"No further piece of the text came for {TEXT_SECONDS:g} s; end the text, or send faster."
                ) from None
            if piece is None:
                return
            yield piece


class StreamedSentences:
    """Text by pieces for a model that must know a whole sentence before it speaks (v1)."""

    def __init__(self, inbox: Inbox, requests: Requests, models: Loopback, frontend: TextFrontend) -> None:
        self._inbox, self._requests, self._models, self._frontend = inbox, requests, models, frontend
        self.close = inbox.close

    def __iter__(self) -> Iterator[Feed]:
        buffer = self._frontend.sentences()
        for piece in self._inbox:
            yield from self._spoken(buffer.feed(piece))
        yield from self._spoken(buffer.end())

    def started(self, responses: Responses) -> None:
        """Nothing to add."""

    def _spoken(self, sentences: list[str]) -> Iterator[Feed]:
        for sentence in sentences:
            if self._frontend.says_something(sentence, self._requests.utterance.markup):
                yield from WrittenText(sentence, self._requests, self._models)


class StreamedText:
    """Text by pieces for a model that speaks while it comes (v2, v3).

    While a request to the language model is being answered, a thread of its own sends the text on; the text
    has one reader at any time.
    """

    def __init__(self, inbox: Inbox, requests: Requests, frontend: TextFrontend) -> None:
        self._requests, self._frontend = requests, frontend
        self._ids = self._text_ids(inbox)
        self._left: tuple[list[int], bool] | None = None  # ids that wait for a request
        self._stream: Feed = {}
        self._over = threading.Event()  # the present request takes no more text
        self._pump = threading.Thread()
        self._error: Exception | None = None
        self.close = inbox.close

    def __iter__(self) -> Iterator[Feed]:
        utterance = self._requests.utterance
        plan, normalise = utterance.plan, utterance.normalise
        prompt = self._frontend.prompt(plan.prompt_text, "transcript", normalise=normalise)
        prefix = self._frontend.prompt(plan.prefix, "system prompt", normalise=normalise)
        while self._error is None and self._fetch():
            self._over = threading.Event()
            self._stream = {names.TEXT_STREAM: np.array([uuid.uuid4().hex.encode()], np.object_)}
            count = np.array([len(prefix)], np.int32)
            yield self._requests.feed(prompt, []) | self._stream | {names.PREFIX_COUNT: count}
            self._over.set()
            self._pump.join()
        if self._error is not None:
            raise self._error

    def started(self, responses: Responses) -> None:
        """Send the text on."""
        self._pump = threading.Thread(target=self._send, args=(responses,), daemon=True)
        self._pump.start()

    def _send(self, responses: Responses) -> None:
        """Send one piece: some sentences, or as much as the language model takes."""
        room, ends = MAX_TEXT_TOKENS, False
        try:
            while room > 0 and not (ends and room <= MAX_TEXT_TOKENS - LONG_TOKENS) and self._fetch():
                if self._over.is_set():
                    return
                assert self._left is not None
                ids, ends = self._left
                responses.send(self._stream | {names.TEXT_TOKENS: np.array(ids[:room], np.int32)})
                self._left = (ids[room:], ends) if len(ids) > room else None
                room -= len(ids)
        except Exception as error:  # noqa: BLE001  (raised again where the text is read; what came is spoken)
            self._error = error
        finally:
            responses.send(self._stream | {names.TEXT_END: np.array([True])})

    def _fetch(self) -> bool:
        """Have ids in `_left`; False when the text has ended."""
        if self._left is None:
            self._left = next(self._ids, None)
        return self._left is not None

    def _text_ids(self, inbox: Inbox) -> Iterator[tuple[list[int], bool]]:
        sentences = self._frontend.sentence_ids(self._requests.utterance.markup)
        for part in inbox:
            yield from sentences.feed(part)
        yield from sentences.end()
