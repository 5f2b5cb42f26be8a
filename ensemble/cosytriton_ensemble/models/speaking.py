"""From speech tokens to sound: what `tts` and `tts_stream` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import GenerationError
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.pieces import Piece, PieceReader
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.models.sources import Requests, TokenSource, WrittenText
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import Chunks, ChunkVocoder, FlowCall, Tempo, chunks_of, vocoder_of
from cosytriton_ensemble.turns import Precedence
from cosytriton_ensemble.utterance import Utterance

if TYPE_CHECKING:  # it brings ONNX Runtime, which `tts` does without
    from cosytriton_ensemble.streaming_flow import FlowStream, StreamingFlow


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A chunk of speech."""

    samples: Array  # FP32 [n]
    tokens: int  # speech tokens that it says
    reason: str  # why its piece of the text ended; "" while it goes on

    def response(self, offset: int, rate: int) -> Feed:
        """Make the response whose first sample is the request's sample `offset`."""
        return {
            names.WAVEFORM: self.samples,
            names.SAMPLE_COUNT: np.array([self.samples.size], np.int32),
            names.SAMPLE_OFFSET: np.array([offset], np.int64),
            names.SAMPLE_RATE: np.array([rate], np.int32),
            names.TOKEN_COUNT: np.array([self.tokens], np.int32),
            names.FINISH_REASON: np.array([self.reason.encode()], np.object_),
        }


class Speaker:
    """Speaks one request.

    It shares nothing with another one, and has one call to a stage in flight at most.
    """

    def __init__(
        self,
        utterance: Utterance,
        pipeline: Pipeline,
        models: Loopback,
        sender: Sender,
        streamed: bool,
        flow: StreamingFlow | None = None,
    ) -> None:
        self._utterance, self._pipeline, self._family = utterance, pipeline, pipeline.family
        self._models, self._sender, self._streamed = models, sender, streamed
        self._precedence = Precedence.here()
        self._flow = None if utterance.official else flow
        self._gathered = models.gathers(pipeline.flow)
        self._voice = utterance.voice.feed(self._family, utterance.plan.flow_prompt, self._gathered)
        self._urgent = streamed  # until the first sound of a stream

    def sounds(self, source: TokenSource | None = None) -> Iterator[Sound]:
        """Speak chunk by chunk; `source` gives the text that is not in the utterance itself."""
        if self._utterance.plan.mode == "conversion":
            yield from self._speak([Piece(self._utterance.source.tolist(), ended=True)])
            return
        requests = Requests(self._utterance, self._family)
        source = source or WrittenText(self._utterance.text, requests, self._models)
        with PieceReader(source, self._pipeline.speech_lm, self._models, self._sender) as pieces:
            for piece in pieces:
                yield from self._speak(piece)

    def _speak(self, growing: Iterable[Piece]) -> Iterator[Sound]:
        """The chunks of one piece."""
        utterance, family = self._utterance, self._family
        chunks = chunks_of(family, self._voice, self._streamed, utterance.official)
        vocoder = vocoder_of(family, utterance.official, self._gathered)
        tempo = Tempo(utterance.speed)
        with self._flow.stream(self._voice) if self._flow else nullcontext() as stream:
            for piece in growing:
                while call := chunks.next_call(len(piece.tokens), piece.ended):
                    with self._precedence.turn(self._urgent):
                        self._sender.check_client()
                        mel = tempo.change(self._mel(piece.tokens, call, chunks, stream), call.finalize)
                        self._sender.check_client()
                        samples = self._samples(mel, call, vocoder)
                    self._urgent = False
                    yield Sound(samples, call.spoken, piece.reason if call.finalize else "")

    def _mel(self, tokens: list[int], call: FlowCall, chunks: Chunks, stream: FlowStream | None) -> Array:
        if stream is not None and call.streaming:
            return stream.mel(tokens, call, self._urgent)
        given = np.array(tokens[call.first : call.end], np.int32)
        padding = self._pipeline.tokens.padded(given.size, self._gathered) - given.size
        feed = self._voice | {
            names.TOKENS: np.pad(given, (0, padding)),
            names.TOKEN_COUNT: np.array([given.size], np.int32),
        }
        feed |= chunks.inputs(call)
        return chunks.mel(call, self._models.call(self._pipeline.flow, feed, urgent=self._urgent))

    def _samples(self, mel: Array, call: FlowCall, vocoder: ChunkVocoder) -> Array:
        heard = vocoder.feed(mel, call.finalize)
        outputs = self._models.call(self._pipeline.vocoder, heard, urgent=self._urgent)
        samples = vocoder.emit(outputs, call.finalize)
        if not np.isfinite(samples).all():
            raise GenerationError("The vocoder made NaN; the chunk was not sent.")
        return samples
