"""The subcommand `cosytriton bench`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.profiles import CPU, CPU_INT8, PROFILES

PARTS = ("stages", "whole", "load", "roofline")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="directory of the checkpoint, for PyTorch")
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), help="what it was exported to"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        choices=[name for name, profile in PROFILES.items() if not profile.gpu],
        default=[CPU.name, CPU_INT8.name],
        help="measured side by side; the last one also serves many requests (default: %(default)s)",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--stages", nargs="+", metavar="MODEL", help="models to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="small batches, short speech, one round")
    parser.add_argument("--against", type=Path, metavar="FILE", help="results.json of an earlier run")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("build/bench"))
    parser.add_argument("--prompt-seconds", type=float, default=3, help="of the reference")
    parser.add_argument("--speech-seconds", type=float, default=5, help="of the speech")
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant takes its turn")
    parser.add_argument("--threads", type=int, default=0, help="of each variant (default: every core)")
    parser.add_argument(
        "--official",
        type=Path,
        metavar="DIR",
        help="folder with transformers 4.51.3 (default: it is installed)",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 when a figure misses its limit")


def _bench(args: argparse.Namespace) -> int:
    from cosytriton_bench.bench import run_bench
    from cosytriton_bench.compare import changes, differences
    from cosytriton_bench.criteria import lines, missed
    from cosytriton_bench.report import write_reports
    from cosytriton_bench.results import Results

    # A run that is told to stop takes its server along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    before = Results.read(args.against) if args.against else None  # not after 20 minutes
    results = run_bench(args)
    write_reports(results, args.output)
    if before is not None:
        found = [*differences(before, results), *map(str, changes(before, results))]
        sys.stdout.write("".join(f"{line}\n" for line in found or ["nothing changed beyond the noise"]))
    sys.stdout.write(f"{args.output / 'results.json'}, results.md, results.html\n")
    sys.stdout.write("".join(f"{line}\n" for line in lines(results.figures)))
    return int(args.strict and missed(results.figures))


BENCH = Command("measure stages and the whole beside PyTorch", _arguments, _bench)
