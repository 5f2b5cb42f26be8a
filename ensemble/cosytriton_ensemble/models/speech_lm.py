"""`speech_lm`: text tokens to speech tokens, all requests in one in-flight batch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import CosytritonError, InputError
from cosytriton_ensemble.generation import FinishReason, SpeechRequest, TextInput
from cosytriton_ensemble.kv_cache import MIB, CacheMemory
from cosytriton_ensemble.language_model import open_decoder
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.metrics import ACTIVE_SLOTS
from cosytriton_ensemble.models.requests import Gauge, Sender, read
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.utterance import max_tokens_of, number_of, text_of

NICENESS = 10  # a tenth of the time of a core that sound is computed on


class TritonPythonModel:
    """Hands requests to the engine, and the further pieces of a streamed text to their request."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph and start the engine."""
        setting = Setting.of(args)
        if setting.device == "cpu":
            # Once there are tokens for the first sound, the rest can wait until it is made: side by side on
            # the same cores both take two to three times as long.
            os.nice(NICENESS)
        self._stage = setting.pipeline.speech_lm
        self._max_tokens = setting.pipeline.tokens.max
        threads, slots = setting.number("intra_op_thread_count"), setting.number("slots")
        self._engine = LlmEngine(
            open_decoder(
                setting.graph(),
                device=setting.device,
                threads=threads,
                rows=slots,
                max_positions=setting.pipeline.longest_sequence,
                memory=CacheMemory(MIB * setting.number("cache_mib"), MIB * setting.number("prefix_mib")),
            ),
            setting.family,
            chunk=setting.number("chunk"),
            max_waiting=setting.number("max_waiting"),
            max_tokens=self._max_tokens,
            text_timeout=setting.number("text_timeout"),
        )
        self._texts: dict[str, TextInput] = {}
        self._lock = threading.Lock()  # guards `_texts`
        description = "Requests that take part in the language model's steps"
        self._gauge = Gauge(ACTIVE_SLOTS, description, self._stage)

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests and return; the engine's thread answers."""
        for request in requests:
            sender = Sender(request)
            with sender.guard():
                feed = read(request, self._stage)
                stream = text_of(feed, names.TEXT_STREAM)
                if stream and names.SEED not in feed:
                    self._push(stream, feed)
                    sender.end()
                else:
                    self._submit(feed, sender, stream)

    def finalize(self) -> None:
        """End the engine."""
        self._engine.close()
        self._gauge.close()

    def _submit(self, feed: Feed, sender: Sender, stream: str) -> None:
        request = self._speech_request(feed, bool(stream))
        answer = _Answer(sender, self._report, lambda: self._forget(stream))
        with self._lock:  # the answer may end before its text is known
            text = self._engine.submit(request, answer)
            if stream and not answer.ended:
                self._texts[stream] = text

    def _push(self, stream: str, feed: Feed) -> None:
        with self._lock:
            text = self._texts.get(stream)
        if text is None:
            return  # its request has ended
        if names.TEXT_TOKENS in feed:
            text.push_text(feed[names.TEXT_TOKENS].tolist())
        if number_of(feed, names.TEXT_END, 0):
            text.end_text()

    def _forget(self, stream: str) -> None:
        with self._lock:
            self._texts.pop(stream, None)

    def _report(self) -> None:
        """Publish how many requests are active."""
        self._gauge.set(self._engine.stats().active)

    def _speech_request(self, feed: Feed, streamed: bool) -> SpeechRequest:
        limit = max_tokens_of(feed)
        if limit is not None and limit > self._max_tokens:
            raise InputError(f"{names.MAX_TOKENS} is {limit}; give 1 to {self._max_tokens}, or leave it out.")
        count = int(number_of(feed, names.PROMPT_TOKEN_COUNT, 0))
        prompt = feed.get(names.PROMPT_TOKENS, np.zeros(0, np.int32))[:count]
        official = bool(number_of(feed, names.OFFICIAL, 0))
        return SpeechRequest(
            text=feed.get(names.TEXT_TOKENS, np.zeros(0, np.int32)).tolist(),
            prompt_text_count=int(number_of(feed, names.PROMPT_TEXT_COUNT, 0)),
            prompt_speech=prompt.tolist(),
            seed=int(number_of(feed, names.SEED, 0)) % 2**63,
            max_tokens=limit,
            speaker=feed.get(names.SPEAKER_EMBEDDING),
            text_streaming=streamed,
            prefix_count=int(number_of(feed, names.PREFIX_COUNT, 0)),
            watchdog=not official,
            official_min_length=official,
        )


class _Answer:
    """The engine's listener for one request; `report` publishes the engine's state."""

    def __init__(self, sender: Sender, report: Callable[[], None], forget: Callable[[], None]) -> None:
        self._sender, self._report, self._forget = sender, report, forget
        self._started = self.ended = False

    def on_token(self, token: int) -> None:
        self._sender.send({names.TOKENS: np.array([token], np.int32)})
        if not self._started:
            self._started = True
            self._report()

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        self.ended = True
        self._report()
        if reason is not None:
            self._sender.send({names.FINISH_REASON: np.array([reason.encode()], np.object_)})
        self._sender.end(error)
        self._forget()

    def cancelled(self) -> bool:
        return self._sender.is_cancelled()
