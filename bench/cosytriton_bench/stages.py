"""Stage by stage: each profile's graphs beside PyTorch eager, in turn, and checked against it once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cosytriton_bench.errors import BenchError
from cosytriton_bench.measure import Figure, Figures, Run, in_turn
from cosytriton_bench.sessions import Decoding, NativeStage, graph_of
from cosytriton_bench.worker import EagerProcess
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU
from cosytriton_ensemble.spec import Array, Stage

EAGER = "eager"
LANGUAGE_MODEL = "speech_lm"
WRONG = 2e-2  # an error beyond it, relative to the largest value, is other maths and no rounding
_PLACES = 5  # where between the prompt and the last token PyTorch's steps are timed, and how many at each
_STEPS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageBench:
    """Measures the stages of a repository.

    Attributes:
        workload: the request.
        repository: whose graphs are run.
        profiles: which ones.
        eager: the same checkpoint in PyTorch.

    """

    workload: Workload
    repository: Path
    profiles: Sequence[str]
    eager: EagerProcess

    def run(self, stages: Iterable[str] | None = None) -> Figures:
        """Measure some stages, by their models' names; all if not given."""
        pipeline = pipeline_of(self.workload.family)
        known: dict[str, Stage] = {
            stage.name: stage for stage in (*pipeline.native_stages, pipeline.speech_lm)
        }
        chosen = list(known if stages is None else stages)
        if unknown := sorted(set(chosen) - known.keys()):
            raise BenchError(f"unknown stages {', '.join(unknown)}; known are {', '.join(known)}.")
        figures: Figures = {}
        for name in chosen:
            _log.info("measuring %s", name)
            figures |= self._language_model() if name == LANGUAGE_MODEL else self._native(known[name])
        return figures

    def _native(self, stage: Stage) -> Figures:
        """One request beside PyTorch; several short ones as a batch, the graphs alone."""
        work = self.workload
        feed = work.feed(stage.name)
        graphs = {
            name: NativeStage.open(self.repository, stage, name, work.threads) for name in self.profiles
        }
        wanted = self.eager.call("outputs", stage.name, feed)
        for name, graph in graphs.items():
            given = graph.outputs(feed)
            if name == CPU.name:
                check(stage.name, wanted, given)
        runs: dict[str, Run] = {EAGER: partial(self.eager.call, "stage", stage.name, feed)}
        runs |= {name: partial(graph.time, feed) for name, graph in graphs.items()}
        figures = in_turn(stage.name, runs, work.rounds)
        batches = [rows for rows in (1, *work.stage_batches) if rows <= stage.max_batch]
        for graph in graphs.values():  # the memory of the largest batch is taken before the clock runs
            graph.outputs(work.short().feed(stage.name, batches[-1]))
        for rows in batches:
            few = work.short().feed(stage.name, rows)
            runs = {name: partial(graph.time, few) for name, graph in graphs.items()}
            figures |= in_turn(f"{stage.name}_short_b{rows}", runs, 1)
        return figures

    def _language_model(self) -> Figures:
        work, stage = self.workload, pipeline_of(self.workload.family).speech_lm
        models = {
            name: Decoding.open(graph_of(self.repository, stage, name), max(work.batches), work.threads)
            for name in self.profiles
        }
        some = next(iter(models.values()))
        prompt = some.prompt(work.prompt_positions, work.prompt_tokens)
        if CPU.name in models:
            fed = [some.spec.speech_offset + code for code in (1, 2)]
            wanted = self.eager.call("logits", prompt.tolist(), fed)
            check(LANGUAGE_MODEL, [wanted], [models[CPU.name].logits(prompt, fed)])
        ids = prompt.tolist()
        runs: dict[str, Run] = {EAGER: partial(self.eager.call, "prefill", ids)}
        runs |= {name: partial(model.prefill, prompt) for name, model in models.items()}
        for run in runs.values():
            run()
        figures = in_turn("lm_prefill", runs, work.rounds + 2)
        last = work.prompt_positions + work.tokens - _STEPS
        places = np.linspace(work.prompt_positions, last, _PLACES).astype(int).tolist()
        for rows in work.batches:
            runs = {EAGER: partial(self.eager.call, "decode", rows, places, _STEPS)}
            runs |= {name: partial(model.decode, rows, prompt, work.tokens) for name, model in models.items()}
            rounds = work.rounds if rows in (1, 8) else 1
            figures |= in_turn(f"lm_decode_b{rows}", runs, rounds)
        runs = {name: partial(model.speak, prompt, work.tokens) for name, model in models.items()}
        return figures | in_turn("lm_speech", runs, work.rounds)


def check(stage: str, wanted: Sequence[Array], given: Sequence[Array]) -> None:
    """Raise BenchError unless PyTorch and the FP32 graph compute the same."""
    for index, (ours, theirs) in enumerate(zip(wanted, given, strict=True)):
        error = difference(ours, theirs)
        if not error <= WRONG:
            raise BenchError(
                f"{stage}: output {index} of the FP32 graph differs from PyTorch by {error:.1e} of its "
                "largest value. Repository and checkpoint must belong together; export it again."
            )


def difference(wanted: Array, given: Array) -> float:
    """The largest error over the largest value, or the share of ids that differ; inf of other shapes."""
    if wanted.shape != given.shape:
        return float("inf")
    if np.issubdtype(wanted.dtype, np.integer):
        return float(np.mean(wanted != given))
    return float(np.abs(wanted - given).max() / max(1.0, float(np.abs(wanted).max())))


def tokens_per_second(figures: Figures, batches: Iterable[int]) -> Figures:
    """What the steps of a batch make together."""
    made: Figures = {}
    for rows in batches:
        case = f"lm_decode_b{rows}/"
        for name, figure in figures.items():
            if name.startswith(case):
                samples = tuple(rows / seconds for seconds in figure.samples)
                made[f"lm_tokens_b{rows}/{name.removeprefix(case)}"] = Figure("tokens/s", samples)
    return made
