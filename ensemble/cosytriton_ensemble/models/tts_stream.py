"""`tts_stream`: speaks chunk by chunk while the language model is still talking."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np

from cosytriton_ensemble.errors import CancelledError, GenerationError
from cosytriton_ensemble.models.concurrent import ConcurrentModel
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.models.speech_tokens import padded
from cosytriton_ensemble.pipeline import (
    COSYVOICE2,
    FINALIZE,
    FLOW,
    FRAME_COUNT,
    MEL,
    PROMPT_TOKEN_COUNT,
    SAMPLE_COUNT,
    SOURCE,
    SPEECH_LM,
    STREAMING,
    TEXT_FRONTEND,
    TOKEN_COUNT,
    TOKEN_IDS,
    TTS_STREAM,
    VOCODER,
    WAVEFORM,
)
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import ChunkSchedule, ChunkVocoder, FlowCall
from cosytriton_ensemble.voice import used_prompt_count


class TritonPythonModel(ConcurrentModel):
    """A stream has at most one call to the flow or the vocoder in flight."""

    stage = TTS_STREAM

    def answer(self, feed: Feed, sender: Sender, models: Loopback) -> None:
        """Speak one request."""
        Utterance(feed, sender, models).speak()


class Utterance:
    """One streamed request. Nothing of it is shared with another one.

    A second thread takes the tokens, so that a client who goes is noticed between two tokens and not
    after the flow, and the language model's slot is free at once.
    """

    def __init__(self, feed: Feed, sender: Sender, models: Loopback) -> None:
        self._feed = feed
        self._sender = sender
        self._models = models
        self._arrived: SimpleQueue[list[int] | Exception | None] = SimpleQueue()  # None: no more tokens
        self._failed = False

    def speak(self) -> None:
        """Send every chunk, then the end."""
        used = np.array([used_prompt_count(self._feed)], np.int32)
        self._feed |= {PROMPT_TOKEN_COUNT.name: used} | self._models.call(TEXT_FRONTEND, self._feed)
        schedule, vocoder = ChunkSchedule(int(used[0])), ChunkVocoder()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            for tokens, ended in self._tokens():
                while chunk := schedule.next_call(len(tokens), ended):
                    self._send(self._chunk(tokens, chunk, vocoder), chunk)
        except BaseException:
            self._failed = True
            raise
        self._sender.end()

    def _listen(self) -> None:
        """Hand over the speech tokens, and at last what ended them."""
        try:
            with contextlib.closing(self._models.stream(SPEECH_LM, self._feed)) as responses:
                for response in responses:
                    self._check_client()
                    self._arrived.put(response[TOKEN_IDS.name].tolist())
            self._arrived.put(None)
        except Exception as error:  # noqa: BLE001  (it is raised again where the stream is answered)
            self._arrived.put(error)

    def _tokens(self) -> Iterator[tuple[list[int], bool]]:
        """All speech tokens so far, each time there is one more, and whether they are complete."""
        tokens: list[int] = []
        while (arrived := self._arrived.get()) is not None:
            if isinstance(arrived, Exception):
                raise arrived
            tokens += arrived
            yield tokens, False
        if not tokens:
            raise GenerationError("The language model ended before its first speech token; try another seed.")
        yield tokens, True

    def _chunk(self, tokens: list[int], chunk: FlowCall, vocoder: ChunkVocoder) -> Array:
        """Samples to speak, [n], of one call to the flow and one to the vocoder."""
        given = np.array(tokens[: chunk.tokens], np.int32)
        flow = self._models.call(
            FLOW,
            self._feed
            | {
                TOKEN_IDS.name: padded(given),
                TOKEN_COUNT.name: np.array([given.size], np.int32),
                STREAMING.name: np.array([chunk.streaming]),
                FINALIZE.name: np.array([chunk.finalize]),
            },
        )
        self._check_client()
        frames = slice(COSYVOICE2.frames_per_token * chunk.offset, int(flow[FRAME_COUNT.name][0]))
        spoken = self._models.call(VOCODER, vocoder.feed(flow[MEL.name][frames]))
        return vocoder.emit(spoken[WAVEFORM.name], spoken[SOURCE.name], chunk.finalize)

    def _send(self, waveform: Array, chunk: FlowCall) -> None:
        self._check_client()
        if not np.isfinite(waveform).all():
            raise GenerationError("The vocoder made NaN; the chunk was not sent.")
        ended = chunk.tokens if chunk.finalize else chunk.tokens - COSYVOICE2.lookahead
        self._sender.send(
            {
                WAVEFORM.name: waveform,
                SAMPLE_COUNT.name: np.array([waveform.size], np.int32),
                TOKEN_COUNT.name: np.array([ended - chunk.offset], np.int32),
            }
        )

    def _check_client(self) -> None:
        if self._failed or self._sender.is_cancelled():
            raise CancelledError("The client closed the stream.")
