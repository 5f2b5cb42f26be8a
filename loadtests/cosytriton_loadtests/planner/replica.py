"""One server: what `tts` and `tts_stream` do with a request, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import simpy

from cosytriton_ensemble import names
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.streaming import Chunks, FlowCall, GridChunks, chunks_of
from cosytriton_loadtests.planner.cores import Cores, Precedence, Process
from cosytriton_loadtests.planner.in_flight import Generation, InFlightBatch, QueueFull
from cosytriton_loadtests.planner.stage_times import PAST, Cost, StageTimes


@dataclass(frozen=True, slots=True)
class Speech:
    """What is asked for.

    Attributes:
        scenario: of the workload.
        protocol: as in a `Sample`; a "stream" is answered chunk by chunk.
        pieces: speech tokens of each piece of the text.
        audible: seconds of silence before its first sound.
        speed: of the speech.
        weight: how often, in relation to others.
    """

    scenario: str
    protocol: str
    pieces: tuple[int, ...]
    audible: float = 0.0
    speed: float = 1.0
    weight: float = 1.0

    @property
    def streamed(self) -> bool:
        """Whether it is answered chunk by chunk."""
        return self.protocol.endswith("stream")


@dataclass(slots=True, eq=False)
class Visit:
    """A request on its way.

    Attributes:
        speech: what is asked for.
        came: when.
        chunks: time and seconds of audio of each, as its listener gets it.
        gathered: seconds of audio that wait for the rest, in an answer that is no stream.
        ended: when its last chunk came, or its refusal.
        refused: the language model had no place for it.
    """

    speech: Speech
    came: float
    chunks: list[tuple[float, float]] = field(default_factory=list)
    gathered: float = 0.0
    ended: float = math.inf
    refused: bool = False


class Replica:
    """A server with cores of its own.

    `text_frontend` is part of a request's cost. A stage computes one request at a time: the streams' flow
    by `turns`, `flow` and `vocoder` by Triton's priorities; first sounds go before all others, also before
    what other stages would begin.
    """

    def __init__(self, env: simpy.Environment, times: StageTimes) -> None:
        self._env, self.times = env, times
        self.cores = Cores(env, times.cores, times.slowdown)
        self._precedence = Precedence(env)
        self.language_model = InFlightBatch(env, self.cores, times, self._precedence)
        self._flow, self._flow_stream, self._vocoder = (simpy.PriorityResource(env) for _ in range(3))
        self.visits = 0  # requests that are being answered
        self._family = times.rates
        counts = {
            names.PROMPT_TOKEN_COUNT: times.prompt_tokens,
            names.PROMPT_FRAME_COUNT: self._family.frames(times.prompt_tokens),
        }
        self._voice: Feed = {name: np.array([count]) for name, count in counts.items()}

    def speak(self, visit: Visit) -> Process:
        """Answer a request."""
        self.visits += 1
        yield self._run(self.times.request)
        pieces = simpy.Store(self._env)
        self._env.process(self._read(visit.speech, pieces))
        for _ in visit.speech.pieces:
            generation = yield pieces.get()
            if generation is None:
                visit.refused = True
                break
            yield from self._speak(visit, generation)
        if visit.gathered:
            yield from self._send(visit, visit.gathered)
        visit.ended = self._env.now + self.times.latency
        self.visits -= 1

    def _read(self, speech: Speech, pieces: simpy.Store) -> Process:
        """Have the tokens of one piece after another made, as `PieceReader` does."""
        for tokens in speech.pieces:
            try:
                generation = self.language_model.submit(tokens)
            except QueueFull:
                pieces.put(None)
                return
            yield pieces.put(generation)
            yield generation.complete

    def _speak(self, visit: Visit, generation: Generation) -> Process:
        """The chunks of one piece, each as soon as there are tokens for it."""
        chunks, spoken = chunks_of(self._family, self._voice, visit.speech.streamed, official=False), 0
        while not chunks.finished:
            yield generation.wait(self._needed(chunks, spoken) if visit.speech.streamed else math.inf)
            while call := chunks.next_call(generation.made, generation.ended):
                urgent = visit.speech.streamed and not visit.chunks
                yield from self._precedence.turn(urgent, self._sound(call, spoken, urgent))
                spoken += call.spoken
                seconds = call.spoken / (self._family.token_rate * visit.speech.speed)
                if visit.speech.streamed:
                    yield from self._send(visit, seconds)
                else:
                    visit.gathered += seconds

    def _needed(self, chunks: Chunks, spoken: int) -> float:
        """Tokens that the next chunk waits for."""
        if isinstance(chunks, GridChunks):
            return chunks.needed
        return spoken + self._family.hop_tokens + self._family.lookahead

    def _sound(self, call: FlowCall, spoken: int, urgent: bool) -> Process:
        """The flow and the vocoder of a chunk behind `spoken` tokens, each when it is its turn."""
        prompt = self.times.prompt_tokens
        if call.streaming and self._family.block_mask:
            new = call.spoken + PAST * (prompt + spoken)
            yield from self._turn(self._flow_stream, self.times.flow_stream, new, urgent)
        else:
            yield from self._turn(self._flow, self.times.flow, prompt + call.end - call.first, urgent)
        yield from self._turn(self._vocoder, self.times.vocoder, call.spoken, urgent)

    def _turn(self, stage: simpy.PriorityResource, cost: Cost, tokens: float, urgent: bool) -> Process:
        with stage.request(priority=not urgent) as turn:
            yield turn
            yield self._run(cost, tokens)

    def _send(self, visit: Visit, seconds: float) -> Process:
        yield self._run(self.times.chunk)
        visit.chunks.append((self._env.now + self.times.latency, seconds))

    def _run(self, cost: Cost, tokens: float = 0) -> simpy.Event:
        return self.cores.run(cost.work(tokens), cost.width)
