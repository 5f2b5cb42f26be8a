"""The whole, through the running server and the client: one request at a time, and many."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from cosytriton_bench.errors import BenchError
from cosytriton_bench.measure import Figure, Figures, Unit, timed
from cosytriton_bench.script import LONG_TOKENS, Script
from cosytriton_bench.serving import ServerFigures
from cosytriton_bench.sessions import Decoding, graph_of
from cosytriton_bench.worker import EagerProcess
from cosytriton_bench.workload import Workload
from cosytriton_client import Audio, Client, Timeout
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.serving import serving

PATIENCE = Timeout(connect=30, request=900, first_chunk=900, chunk=900)
CROWDS = (8, 16)
SHORTEST = 0.9  # share of its tokens that a request must speak to be compared
EAGER_ROUNDS = 2  # PyTorch takes most of a minute for each
LOADED_ROUNDS = 2
LONG_REQUESTS = 3  # that a short one comes among

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Samples:
    """Samples of figures while they are gathered."""

    units: dict[str, Unit] = field(default_factory=dict)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, unit: Unit, *values: float) -> None:
        """Append to the samples of a figure."""
        self.units[name] = unit
        self.values[name] += values

    def figures(self) -> Figures:
        """What was gathered."""
        return {name: Figure(self.units[name], tuple(values)) for name, values in self.values.items()}


@dataclass(frozen=True, slots=True)
class ServedBench:
    """Measures a repository as it is served.

    Attributes:
        workload: the request.
        repository: what is served.
        profiles: in which profiles, one after the other.
        eager: the same checkpoint in PyTorch.
        folder: for the servers' logs.

    """

    workload: Workload
    repository: Path
    profiles: Sequence[str]
    eager: EagerProcess
    folder: Path

    def run(self, *, single: bool, crowd: bool) -> Figures:
        """Measure one request at a time in every profile, and many at a time in the last one."""
        samples, script = Samples(), Script.of(self.repository, self.workload)
        for profile in self.profiles:
            last = profile == self.profiles[-1]
            if not single and not last:
                continue
            _log.info("starting the server in the profile %s", profile)
            log, threads = self.folder / f"serve_{profile}.log", self.workload.threads
            options = [f"--profile={profile}", "--exit-timeout=2"]  # in the end nobody listens any more
            options += [f"--threads={threads}"] if threads else []  # default: as the doctor advises
            with ExitStack() as stack:
                with timed() as watch:
                    running = stack.enter_context(serving(self.repository, log, *options))
                samples.add(f"ready/{profile}", "s", watch.seconds)
                server = stack.enter_context(ServerFigures(running))
                client = stack.enter_context(Client(server.url, timeout=PATIENCE))
                one = Visit(self.workload, script, profile, server, client, samples, cycle(script.texts))
                if single:
                    self._single(one, self.workload.rounds if last else 1)
                if crowd and last:
                    one.long_speech()
                    one.crowds()
                    one.short_among_long()
                one.memory.append(server.memory())
                samples.add(f"memory/{profile}", "GB", max(one.memory))
        return samples.figures()

    def _single(self, visit: Visit, rounds: int) -> None:
        work, samples = self.workload, visit.samples
        visit.encode_voice()
        visit.speak()  # warms everything up
        lm = pipeline_of(work.family).speech_lm
        model = Decoding.open(graph_of(self.repository, lm, visit.profile), 1, work.threads)
        for index in range(rounds):
            _log.info("one request: round %d of %d", index + 1, rounds)
            if index < EAGER_ROUNDS:
                self._eager_requests(samples, visit.script.positions)
            visit.one_request(model)
            visit.first_audio("first_audio")

    def _eager_requests(self, samples: Samples, positions: int) -> None:
        """The same request in PyTorch, and the first chunk of its stream."""
        work, family = self.workload, self.workload.family
        watch = self.eager.call("speech", positions, work.tokens, work.feed("flow"), work.feed("vocoder"))
        samples.add("unary/eager", "s", watch.seconds)
        samples.add("unary:cpu/eager", "cpu s", watch.cpu)
        samples.add("rate/eager", "x", work.speech_seconds / watch.seconds)
        hop = family.hop_tokens + -work.prompt_tokens % family.hop_tokens
        made = hop + family.lookahead
        flow = work.flow_feed(made, streaming=True, finalize=False)
        chunk = self.eager.call("speech", positions, made, flow, work.vocoder_feed(family.frames(hop)))
        samples.add("first_audio/eager", "s", chunk.seconds)


@dataclass(frozen=True, slots=True)
class Visit:
    """What is asked of one server."""

    workload: Workload
    script: Script
    profile: str
    server: ServerFigures
    client: Client
    samples: Samples
    texts: Iterator[str]  # to be spoken next
    memory: list[float] = field(default_factory=list)  # GB, seen at times

    def add(self, case: str, unit: Unit, *values: float) -> None:
        """Append samples of this profile."""
        self.samples.add(f"{case}/{self.profile}", unit, *values)

    def speak(self) -> Audio:
        """One answer; another text each time."""
        voice, tokens = self.script.voice, self.workload.tokens
        audio = self.client.synthesize(next(self.texts), voice, seed=0, max_tokens=tokens)
        if audio.token_count < SHORTEST * tokens:
            raise BenchError(
                f"The speech ended after {audio.token_count} of {tokens} tokens ({audio.finish_reason}): it "
                "cannot be compared. Ask for less with --speech-seconds."
            )
        return audio

    def encode_voice(self) -> None:
        """Encode the reference, and again for a client that has not heard it: from Triton's cache."""
        for case in ("encode_first", "encode_again"):
            with Client(self.server.url, timeout=PATIENCE) as other, timed() as watch:
                other.encode(self.script.voice)
            self.add(case, "s", watch.seconds)

    def one_request(self, model: Decoding) -> None:
        """A unary request, beside the sum of its stages.

        The native stages are what Triton measures inside them; the language model, which shares its process
        with its queue, runs here on the same prompt.
        """
        work, native = self.workload, ("flow", "vocoder")
        before = {name: self.server.compute_seconds(name) for name in native}
        cpu = self.server.cpu_seconds()
        with timed() as watch:
            audio = self.speak()
        self.add("unary:cpu", "cpu s", self.server.cpu_seconds() - cpu)
        inside = sum(self.server.compute_seconds(name) - before[name] for name in native)
        lm = model.speak(model.prompt(self.script.positions, work.prompt_tokens), audio.token_count)
        self.add("unary", "s", watch.seconds)
        self.add("rtf", "", watch.seconds / audio.seconds)
        self.add("stages_sum", "s", inside + lm.seconds)
        self.add("overhead", "%", 100 * (watch.seconds / (inside + lm.seconds) - 1))

    def first_audio(self, case: str) -> None:
        """Seconds until the first chunk of a stream, which is then cancelled."""
        voice, tokens = self.script.voice, self.workload.tokens
        start = time.perf_counter()
        with closing(self.client.stream(next(self.texts), voice, seed=0, max_tokens=tokens)) as chunks:
            next(chunks)
            self.add(case, "s", time.perf_counter() - start)

    def long_speech(self) -> None:
        """CPU seconds of long speech, in one answer and as a stream.

        It is converted from a recording: its length is known, and the language model, which does the same in
        both ways, is left out.
        """
        _log.info("long speech")
        source, voice = self.script.source, self.script.voice
        self.client.encode(source)
        ways: dict[str, Callable[[], Iterable[Audio]]] = {
            "long_unary": lambda: [self.client.convert(source, voice)],
            "long_stream": lambda: self.client.convert_stream(source, voice),
        }
        for case, speak in ways.items():
            cpu = self.server.cpu_seconds()
            with timed() as watch:
                tokens = sum(audio.token_count for audio in speak())
            self.add(f"{case}:cpu", "cpu s", self.server.cpu_seconds() - cpu)
            self.add(case, "s", watch.seconds)
            _log.info("%s: %d tokens", case, tokens)

    def crowds(self) -> None:
        """Seconds of speech in a second while 8 and 16 requests are spoken; memory all the while."""
        for count in (2,) if self.workload.quick else CROWDS:
            _log.info("%d requests at a time", count)
            with (
                ThreadPoolExecutor(count) as pool,
                self.server.memory_watched() as memory,
                timed() as watch,
            ):
                answers = [call.result() for call in [pool.submit(self.speak) for _ in range(count)]]
            spoken = sum(audio.seconds for audio in answers)
            self.add(f"rate_{count}", "x", spoken / watch.seconds)
            self.memory.append(max(memory))

    def short_among_long(self) -> None:
        """First audio of a short request that comes while long ones are streamed."""
        _log.info("a short request among %d long ones", LONG_REQUESTS)
        script, tokens = self.script, 2 * self.workload.tokens if self.workload.quick else LONG_TOKENS

        def listen(seed: int, heard: threading.Event, enough: threading.Event) -> None:
            chunks = self.client.stream(script.long_text, script.voice, seed=seed, max_tokens=tokens)
            with closing(chunks):
                for _ in chunks:
                    heard.set()
                    if enough.is_set():
                        return

        for _ in range(min(self.workload.rounds, LOADED_ROUNDS)):
            enough, speaking = threading.Event(), [threading.Event() for _ in range(LONG_REQUESTS)]
            with ThreadPoolExecutor(LONG_REQUESTS) as pool:
                listeners = [pool.submit(listen, *it, enough) for it in enumerate(speaking)]
                for heard in speaking:
                    heard.wait(PATIENCE.first_chunk)
                self.first_audio("first_audio_loaded")
                if not self.workload.quick:  # there they end by themselves at once
                    enough.set()
                for listener in listeners:
                    listener.result()
