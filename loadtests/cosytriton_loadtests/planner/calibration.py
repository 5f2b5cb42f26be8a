"""Stage times from the folder of a load test at a low rate: core seconds of each process by what it did."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, Family
from cosytriton_ensemble.metrics import LM_STEP_ROWS, LM_STEPS, SLOTS
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.simulation import simulate
from cosytriton_loadtests.planner.stage_times import PAST, Cost, StageTimes
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.server_figures import COMPUTE
from cosytriton_loadtests.server_watch import Look, read_looks
from cosytriton_loadtests.workload_file import read_workload

WINDOW = 3.0  # seconds: short enough to tell stages apart, long enough for a request's work to fall into it
LEAST_WINDOWS = 6
PIECE_SECONDS = 45.0  # of speech: what the text front end cuts a long text into
LEAST_QUIET = 1.0  # seconds without a request that tell what the server costs when it idles
OWN = {"tritonserver", "speech_lm", "tts_stream", "flow", "tts", "vocoder"}
"""Processes with costs of their own; those of the others, such as the front ends, belong to the request."""
LEAST_WIDTH = 0.1  # of the language model, which hands tokens on and has the next drawn between its steps
_HALVINGS = 6  # of the interval that its width lies in: to 5 %
_MANY = 1000  # requests, of which the mean hangs little on which were drawn
_ROUNDS = 500  # of the descent

Counts = npt.NDArray[np.float64]  # [windows]


def mix_of(samples: Sequence[Sample], shares: Mapping[str, float] | None = None) -> list[Speech]:
    """What was asked in a run, so that the same mix can be simulated; what was not spoken is left out.

    `shares` of the scenarios replace those that luck gave to a short run.
    """
    spoken = [sample for sample in samples if sample.tokens and sample.audio_seconds]
    rate = _family(spoken).token_rate if spoken else 1
    counts = Counter(sample.scenario for sample in spoken)
    return [
        Speech(
            sample.scenario,
            sample.protocol,
            _pieces(sample.tokens, rate),
            sample.chunks[0].audible or 0.0,
            sample.tokens / (sample.audio_seconds * rate),
            (shares or counts).get(sample.scenario, 0.0) / counts[sample.scenario],
        )
        for sample in spoken
    ]


def mix_of_run(folder: RunFolder) -> list[Speech]:
    """The mix of a run, with the shares of its workload where that can be read."""
    samples = list(folder.samples())
    path = Path(folder.info().options.get("workload", ""))
    scenarios = read_workload(path).scenarios if path.is_file() else {}
    return mix_of(samples, {name: scenario.weight for name, scenario in scenarios.items()})


def _pieces(tokens: int, rate: int) -> tuple[int, ...]:
    """Tokens of each piece, as even as they come."""
    count = -(-tokens // round(rate * PIECE_SECONDS))
    return tuple((tokens + index) // count for index in range(count))


def from_run(folder: RunFolder, cores: float | None = None) -> StageTimes:
    """Measure the stages by what a server's processes did during a run, best at a low rate.

    The core seconds of each process in windows of some seconds are explained, by least squares without
    negative costs, by the requests, chunks and tokens of the windows. How many cores a stage uses at once is
    its core seconds over the time that Triton saw it compute; for the language model it is the number with
    which a simulation of the run gives the run's median first audio, and what is left is latency.

    Args:
        folder: of the run; the server must have been watched on its own machine.
        cores: that the server has; those of this machine if not given.

    Raises:
        LoadTestError: there is no run, its server was not seen, or it was too short.
    """
    samples, looks = _seen(folder)
    times = _Windows(looks, samples).stage_times(cores or os.cpu_count() or 1)
    return _with_waits(times, samples)


def slowed(times: StageTimes, busy: RunFolder) -> StageTimes:
    """With the slowdown that a run near the capacity shows: more core seconds for the same requests.

    Raises:
        LoadTestError: as in `from_run`.
    """
    samples, looks = _seen(busy)
    took = float(_cpu([looks[0], looks[-1]], {process.name for process in looks[0].processes})[0])
    simulated = simulate(times, mix_of(samples), _rate(samples), requests=_MANY)
    return replace(times, slowdown=max(1.0, took / len(samples) / simulated.work))


def _seen(folder: RunFolder) -> tuple[list[Sample], list[Look]]:
    """What was spoken behind the warm-up, and the looks at the server from then on."""
    samples = [sample for sample in folder.samples() if sample.tokens and sample.audio_seconds]
    looks = [look for look in read_looks(folder.server_file) if look.processes]
    if not looks:
        raise LoadTestError(
            f"{folder.path}: the processes of the server were not watched, because it is on another machine. "
            "Run the load test where it is, or take the results.json of `cosytriton bench`."
        )
    if not samples:
        raise LoadTestError(
            f"{folder.path}: nothing was spoken behind the warm-up, so nothing can be measured."
        )
    first = min(sample.intended for sample in samples)
    begin = max((number for number, look in enumerate(looks) if look.at <= first), default=0)
    return samples, looks[begin:]


class _Windows:
    """A run in windows, with the counts that explain each one's work."""

    def __init__(self, looks: Sequence[Look], samples: Sequence[Sample]) -> None:
        self._all, self._looks = looks, [looks[0]]
        for look in looks:
            if look.at - self._looks[-1].at >= WINDOW:
                self._looks.append(look)
        self._edges = np.array([look.at for look in self._looks])
        if len(self._edges) <= LEAST_WINDOWS:
            raise LoadTestError(
                f"the run was watched for {self._edges[-1] - self._edges[0]:.0f} s behind the warm-up; "
                f"stage times take {LEAST_WINDOWS * WINDOW:.0f} s or more."
            )
        self._samples, self._family, self._prompt = samples, _family(samples), _prompt(samples)

    def stage_times(self, cores: float) -> StageTimes:
        """All costs; what it takes to hand a token on is part of the step that makes it."""
        everyone = {process.name for look in self._looks for process in look.processes}
        begun = self._count([sample.sent for sample in self._samples])
        rows, steps = self._metric(LM_STEP_ROWS, "speech_lm"), self._metric(LM_STEPS, "speech_lm")
        chunks, tokens = self._chunks(self._samples)
        request, chunk, relayed = self._fit({"tritonserver"}, begun, chunks, rows)
        prefill, step, row = self._fit({"speech_lm"}, begun, steps, rows)
        stream, streamed, read = self._fit({"tts_stream"}, *self._streamed(), rows)
        flow = self._fit({"flow", "tts"}, *self._whole())
        vocoder = self._fit({"vocoder"}, chunks, tokens)
        (others,) = self._fit(everyone - OWN, begun)
        vocoder_width = self._width("vocoder", 1.0)
        width = self._width("flow", vocoder_width)
        return StageTimes(
            family=self._family.name,
            cores=cores - self._idle(everyone),
            request=Cost(request + others),
            prefill=Cost(prefill),
            step=Cost(step, row + relayed + read),
            flow=Cost(flow[0], flow[1], width),
            flow_stream=Cost(stream, streamed, width),  # the same layers on as many threads
            vocoder=Cost(vocoder[0], vocoder[1], vocoder_width),
            chunk=Cost(chunk),
            prompt_tokens=self._prompt,
            prompt_positions=1,
            slots=int(self._looks[-1].metrics.get(SLOTS, {}).get("speech_lm", 0)) or 8,
        )

    def _streamed(self) -> tuple[Counts, Counts]:
        """Chunks of the flow with a state, and their tokens; one behind them counts `PAST`."""
        times, amounts, rate = [], [], self._family.token_rate
        for sample in filter(self._keeps_state, self._samples):
            said = self._prompt
            for chunk in sample.chunks:
                tokens = round(chunk.seconds * rate)
                times.append(chunk.at)
                amounts.append(tokens + PAST * said)
                said += tokens
        return self._count(times), self._count(times, amounts)

    def _whole(self) -> tuple[Counts, Counts]:
        """Answers, and their tokens, that the flow computed in one piece."""
        whole = [sample for sample in self._samples if not self._keeps_state(sample)]
        ends = [sample.ended for sample in whole]
        return self._count(ends), self._count(ends, [sample.tokens for sample in whole])

    def _keeps_state(self, sample: Sample) -> bool:
        """Whether its flow keeps a state: not where all is said in one chunk."""
        return self._family.block_mask and len(sample.chunks) > 1

    def _chunks(self, samples: Sequence[Sample]) -> tuple[Counts, Counts]:
        """Chunks and their tokens."""
        rate = self._family.token_rate
        chunks = [chunk for sample in samples for chunk in sample.chunks]
        times = [chunk.at for chunk in chunks]
        return self._count(times), self._count(times, [chunk.seconds * rate for chunk in chunks])

    def _count(self, times: Sequence[float], amounts: Sequence[float] | None = None) -> Counts:
        return np.histogram(times, self._edges, weights=amounts)[0].astype(float)

    def _metric(self, name: str, model: str) -> Counts:
        return np.diff([look.metrics.get(name, {}).get(model, 0.0) for look in self._looks])

    def _fit(self, processes: set[str], *counts: Counts) -> list[float]:
        """Core seconds for each count, without those of idling."""
        spent = _cpu(self._looks, processes) - self._idle(processes) * np.diff(self._edges)
        return explain(np.stack(counts, axis=1), np.maximum(0, spent))

    def _idle(self, processes: set[str]) -> float:
        """Cores that are used while nothing is asked."""
        spans = np.array([[one.intended, one.ended] for one in self._samples])
        pairs = list(pairwise(self._all))
        quiet = [(a, b) for a, b in pairs if not ((spans[:, 0] < b.at) & (spans[:, 1] > a.at)).any()]
        seconds = sum(b.at - a.at for a, b in quiet)
        if seconds < LEAST_QUIET:
            return 0.0
        return sum(float(_cpu(pair, processes)[0]) for pair in quiet) / seconds

    def _width(self, model: str, otherwise: float) -> float:
        """Cores that a native stage uses, by the time that Triton saw it compute."""
        seconds = float(self._metric(COMPUTE, model).sum()) * 1e-6
        return float(_cpu(self._looks, {model}).sum()) / seconds if seconds else otherwise


def _cpu(looks: Sequence[Look], processes: set[str]) -> Counts:
    """Core seconds between looks; a process that ends takes its count with it."""
    spent = [sum(p.cpu for p in look.processes if p.name in processes) for look in looks]
    return np.maximum(0.0, np.diff(spent))


def explain(counts: npt.NDArray[np.float64], seconds: Counts) -> list[float]:
    """Least squares without negative costs: counts [windows, kinds] times costs [kinds] is seconds [windows].

    Coordinate descent (Franc, Hlavac and Navara, "Sequential coordinate-wise algorithm for the non-negative
    least squares problem", 2005). What never happened costs nothing.
    """
    products, wanted = counts.T @ counts, counts.T @ seconds
    costs = np.zeros(len(wanted))
    kinds = [kind for kind in range(len(wanted)) if products[kind, kind] > 0]
    for _ in range(_ROUNDS):
        for kind in kinds:
            rest = wanted[kind] - products[kind] @ costs
            costs[kind] = max(0.0, costs[kind] + rest / products[kind, kind])
    return [float(cost) for cost in costs]


def _family(samples: Sequence[Sample]) -> Family:
    """By the rate of its tokens; that of 2 and 3 is the same."""
    rate = sum(sample.tokens for sample in samples) / sum(sample.audio_seconds for sample in samples)
    return min((COSYVOICE1, COSYVOICE2), key=lambda family: abs(family.token_rate - rate))


def _prompt(samples: Sequence[Sample]) -> int:
    """Tokens of the reference, but for whole hops: the first chunk of a stream fills the one it ends in."""
    family = _family(samples)
    first = [
        round(sample.chunks[0].seconds * family.token_rate)
        for sample in samples
        if len(sample.chunks) > 1 and sample.protocol.endswith("stream")
    ]
    return -int(np.median(first)) % family.hop_tokens if first else 0


def _with_waits(times: StageTimes, samples: Sequence[Sample]) -> StageTimes:
    """With the pace of the language model, and the latency, that agree with the measured first audio."""
    mix, rate = mix_of(samples), _rate(samples)
    measured = _median(samples)

    def first_audio(candidate: StageTimes) -> float:
        return _median(simulate(candidate, mix, rate, requests=200).samples)

    def paced(width: float) -> StageTimes:
        prefill, step = replace(times.prefill, width=width), replace(times.step, width=width)
        return replace(times, prefill=prefill, step=step)

    slow, quick = LEAST_WIDTH, times.cores
    for _ in range(_HALVINGS):
        middle = math.sqrt(slow * quick)
        slow, quick = (slow, middle) if first_audio(paced(middle)) <= measured else (middle, quick)
    best = paced(quick)
    return replace(best, latency=max(0.0, measured - first_audio(best)))


def _rate(samples: Sequence[Sample]) -> float:
    """Requests a second."""
    begun = [sample.intended for sample in samples]
    return max(1, len(samples) - 1) / max(1e-3, max(begun) - min(begun))


def _median(samples: Sequence[Sample]) -> float:
    return float(np.median([sample.first_audio for sample in samples if sample.first_audio is not None]))
