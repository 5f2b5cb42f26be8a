"""A run of the benchmark: PyTorch and the graphs of each profile, stage by stage, then the running server."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from cosytriton_bench.measure import Figure, Figures
from cosytriton_bench.peaks import measured_peaks
from cosytriton_bench.results import Results, settings_of, this_machine
from cosytriton_bench.roofline import Roofline
from cosytriton_bench.served import ServedBench
from cosytriton_bench.stages import StageBench, tokens_per_second
from cosytriton_bench.worker import EagerProcess
from cosytriton_bench.workload import Workload
from cosytriton_export.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


def run_bench(args: argparse.Namespace) -> Results:
    """Measure what the arguments of the command ask for."""
    checkpoint = Checkpoint.open(args.checkpoint)
    work = _workload(args, checkpoint)
    machine = this_machine()
    figures: Figures = {}
    with EagerProcess(args.checkpoint, args.threads, args.official) as eager:
        baseline = str(eager.call("about"))
        _log.info("baseline: %s", baseline)
        if "stages" in args.parts:
            figures |= StageBench(work, args.repository, args.profile, eager).run(args.stages)
            figures |= tokens_per_second(figures, work.batches)
        if {"whole", "load"} & set(args.parts):
            args.output.mkdir(parents=True, exist_ok=True)
            served = ServedBench(work, args.repository, args.profile, eager, args.output)
            figures |= served.run(single="whole" in args.parts, crowd="load" in args.parts)
        figures["memory/eager"] = Figure("GB", (eager.resident_bytes / 1e9,))
    rows: list[dict[str, Any]] = []
    if "roofline" in args.parts:
        peaks = measured_peaks(args.threads)
        roofline = Roofline(work, args.repository, args.profile, figures)
        rows = [row.facts(peaks) for row in roofline.rows(args.stages)]
        machine |= {"peak_fp32_gflops": 2 * peaks.fp / 1e9, "peak_int8_gops": 2 * peaks.int8 / 1e9}
        machine |= {"read_gb_per_s": peaks.bandwidth / 1e9}
    return Results(machine, settings_of(work, checkpoint.digest, baseline), figures, tuple(rows))


def _workload(args: argparse.Namespace, checkpoint: Checkpoint) -> Workload:
    if args.quick:
        return Workload(checkpoint.family, 1, 1, rounds=1, threads=args.threads, quick=True)
    return Workload(checkpoint.family, args.prompt_seconds, args.speech_seconds, args.rounds, args.threads)
