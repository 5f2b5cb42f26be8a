"""`speech_lm`: text tokens to speech tokens, all requests in one in-flight batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import CosytritonError, InputError
from cosytriton_ensemble.generation import FinishReason, SpeechRequest, TextInput
from cosytriton_ensemble.kv_cache import MIB, CacheMemory
from cosytriton_ensemble.language_model import open_decoder
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.metrics import (
    ACTIVE_SLOTS,
    KV_CACHE,
    LM_ENDS,
    LM_STEP_ROWS,
    LM_STEPS,
    LM_TOKENS,
    MEMORY,
    PREFIX_CACHE,
    SLOTS,
    WAITING,
)
from cosytriton_ensemble.models.metrics import Publisher, Readings, ServerMemory
from cosytriton_ensemble.models.requests import Sender, read
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.turns import Precedence
from cosytriton_ensemble.utterance import max_tokens_of, number_of, text_of


class TritonPythonModel:
    """Hands requests to the engine, and the further pieces of a streamed text to their request."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph and start the engine."""
        setting = Setting.of(args)
        self._stage = setting.pipeline.speech_lm
        self._max_tokens = setting.pipeline.tokens.max
        threads, slots = setting.number("intra_op_thread_count"), setting.number("slots")
        self._model = open_decoder(
            setting.graph(),
            device=setting.device,
            threads=threads,
            rows=slots,
            max_positions=setting.pipeline.longest_sequence,
            memory=CacheMemory(MIB * setting.number("cache_mib"), MIB * setting.number("prefix_mib")),
        )
        self._engine = LlmEngine(
            self._model,
            setting.family,
            chunk=setting.number("chunk"),
            max_waiting=setting.number("max_waiting"),
            max_tokens=self._max_tokens,
            text_timeout=setting.number("text_timeout"),
            precedence=Precedence.here(),
        )
        self._texts: dict[str, TextInput] = {}
        self._lock = threading.Lock()  # guards `_texts`
        self._ends: Counter[str] = Counter()  # counted by the engine's thread alone
        self._memory = ServerMemory()
        self._metrics = Publisher(self._stage, self._readings)

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
        self._metrics.close()

    def _submit(self, feed: Feed, sender: Sender, stream: str) -> None:
        request = self._speech_request(feed, bool(stream))
        answer = _Answer(sender, self._metrics.changed, lambda reason: self._ended(stream, reason))
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

    def _ended(self, stream: str, reason: FinishReason | None) -> None:
        with self._lock:
            self._texts.pop(stream, None)
        if reason is not None:
            self._ends[reason] += 1
        self._metrics.changed()

    def _readings(self) -> Readings:
        """What is published of the engine."""
        stats, memory = self._engine.stats(), self._model.memory()
        values = {
            ACTIVE_SLOTS: stats.active,
            SLOTS: self._model.rows,
            WAITING: stats.waiting,
            LM_TOKENS: stats.tokens,
            LM_STEPS: stats.steps,
            LM_STEP_ROWS: stats.step_rows,
            KV_CACHE: memory.rows,
            PREFIX_CACHE: memory.prefixes,
            MEMORY: self._memory.read(),
        }
        ends = {(LM_ENDS, reason): count for reason, count in dict(self._ends).items()}
        return {**{(name, ""): value for name, value in values.items()}, **ends}

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
    """The engine's listener for one request, which tells the model that something `changed` or it `ended`."""

    def __init__(
        self, sender: Sender, changed: Callable[[], None], ended: Callable[[FinishReason | None], None]
    ) -> None:
        self._sender, self._changed, self._tell = sender, changed, ended
        self.ended = False

    def on_token(self, token: int) -> None:
        self._sender.send({names.TOKENS: np.array([token], np.int32)})
        self._changed()

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        self.ended = True
        self._changed()
        if reason is not None:
            self._sender.send({names.FINISH_REASON: np.array([reason.encode()], np.object_)})
        self._sender.end(error)
        self._tell(reason)

    def cancelled(self) -> bool:
        return self._sender.is_cancelled()
