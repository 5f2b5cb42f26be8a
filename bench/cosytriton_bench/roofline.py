"""A roofline: the least that the products of each stage take, the share of it reached, what holds the rest.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. The limit of a run is the time of its products at the machine's best rate,
or that of reading their weights, whichever is longer. What else a graph computes could be done beside them.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort

from cosytriton_bench.measure import Figures
from cosytriton_bench.operations import Work, work_of
from cosytriton_bench.peaks import Peaks
from cosytriton_bench.sessions import Decoding, NativeStage, graph_of, options_of
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.onnx_session import open_session
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.spec import Feed, Stage

MOST_KINDS = 5  # of nodes that are named as what holds the rest
_STEPS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one profile.

    Attributes:
        case, profile: as in the names of figures.
        fp32, int8: multiply-adds of a run.
        weight_bytes, weights: that a run reads.
        seconds: that it takes.
        products: share of the nodes' time that products take.
        rest: the other kinds of nodes and their shares, the largest first.

    """

    case: str
    profile: str
    fp32: int
    int8: int
    weight_bytes: int
    weights: int
    seconds: float
    products: float
    rest: tuple[tuple[str, float], ...]

    def limit(self, peaks: Peaks) -> float:
        """The least seconds."""
        return peaks.seconds(self.fp32, self.int8, self.weight_bytes)

    def facts(self, peaks: Peaks) -> dict[str, Any]:
        """The row for the results, with its limit."""
        limit = self.limit(peaks)
        return asdict(self) | {"limit": limit, "reached": limit / self.seconds}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Counts and profiles the graphs of a repository.

    Attributes:
        workload: whose shapes are taken.
        repository: whose graphs.
        profiles: which of them.
        figures: measured before; the time of a run that is not among them includes its profiling.

    """

    workload: Workload
    repository: Path
    profiles: Sequence[str]
    figures: Figures

    def rows(self, stages: Sequence[str] | None = None) -> Iterator[Row]:
        """A row for each case and profile."""
        pipeline, work = pipeline_of(self.workload.family), self.workload
        for stage in pipeline.native_stages:
            if stage.learned and (stages is None or stage.name in stages):
                run = partial(_run_stage, work.feed(stage.name))
                for profile in self.profiles:
                    options = partial(_stage_options, stage, profile, work.threads)
                    yield self._row(stage.name, stage, profile, options, run)
        if stages is None or pipeline.speech_lm.name in stages:
            for profile in self.profiles:
                for case, use in self._language_model_runs().items():
                    yield self._row(case, pipeline.speech_lm, profile, self._language_model_options, use)

    def _language_model_options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.workload.threads
        options.enable_mem_pattern = False
        return options

    def _language_model_runs(self) -> Mapping[str, Callable[[ort.InferenceSession], object]]:
        work = self.workload

        def prefill(session: ort.InferenceSession) -> object:
            model = Decoding.of(session, 1)
            return model.prefill(model.prompt(work.prompt_positions, work.prompt_tokens))

        def decode(rows: int, session: ort.InferenceSession) -> object:
            model = Decoding.of(session, rows)
            return model.decode(rows, model.prompt(work.prompt_positions, work.prompt_tokens), _STEPS)

        batches = [rows for rows in work.batches if rows in (1, 2, 8)]
        return {"lm_prefill": prefill} | {f"lm_decode_b{rows}": partial(decode, rows) for rows in batches}

    def _row(
        self,
        case: str,
        stage: Stage,
        profile: str,
        options: Callable[[], ort.SessionOptions],
        run: Callable[[ort.InferenceSession], object],
    ) -> Row:
        _log.info("counting %s of %s", case, profile)
        path = graph_of(self.repository, stage, profile)
        counted = profiled(path, options(), run, packed=False)
        timed = profiled(path, options(), run, packed=True)
        whole, measured = timed.seconds.total(), self.figures.get(f"{case}/{profile}")
        return Row(
            case,
            profile,
            counted.fp32,
            counted.int8,
            counted.weight_bytes,
            counted.weights,
            measured.median if measured else whole,
            timed.products / whole,
            tuple((kind, seconds / whole) for kind, seconds in timed.rest[:MOST_KINDS]),
        )


def _stage_options(stage: Stage, profile: str, threads: int) -> ort.SessionOptions:
    return options_of(stage, profile, threads)[0]


def _run_stage(feed: Feed, session: ort.InferenceSession) -> object:
    return NativeStage(session).outputs(feed)


def profiled(
    path: Path, options: ort.SessionOptions, run: Callable[[ort.InferenceSession], object], *, packed: bool
) -> Work:
    """Run a graph with a profile; weights that are packed beforehand are faster, and cannot be counted."""
    with tempfile.TemporaryDirectory(prefix="cosytriton-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = f"{folder}/profile"
        options.add_session_config_entry("session.disable_prepacking", str(int(not packed)))
        session = open_session(path, options)
        run(session)
        profile = Path(session.end_profiling())
        return work_of(json.loads(profile.read_text(encoding="utf-8")), counted=not packed)
