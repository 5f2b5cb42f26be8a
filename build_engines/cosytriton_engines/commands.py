"""The subcommands `cosytriton calibrate`, `build` and `gate`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.errors import CosytritonError, InputError, RepositoryError
from cosytriton_ensemble.profiles import FP32_GRAPH, PROFILES

if TYPE_CHECKING:
    from cosytriton_engines.calibration.sets import CalibrationSet

WAIT_SECONDS = 5  # between two looks for what another process builds

log = logging.getLogger(__name__)


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument(
        "--recordings",
        type=Path,
        metavar="DIR",
        help="recordings of speech, with transcripts in .txt files beside them (default: built-in ones)",
    )
    parser.add_argument("--texts", type=Path, metavar="FILE", help="one text a line (default: built-in ones)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="of the set (default: calibration, beside the repository)"
    )


def _calibrate(args: argparse.Namespace) -> int:
    from cosytriton_engines.calibration.sets import make_set

    out = args.out or args.repository.absolute().parent / "calibration"
    made = make_set(args.repository, out, args.recordings, args.texts, log.info)
    for warning in made.warnings:
        log.warning("warning: %s", warning)
    sys.stdout.write(_table(made))
    return 0


def _table(made: CalibrationSet) -> str:
    lines = [("model", "feeds", "MB")]
    lines += [(model, str(made.count(model)), f"{made.sizes[model] / 1e6:.1f}") for model in made.models]
    rows = "".join(f"{model:<20}{feeds:>6}{size:>9}\n" for model, feeds, size in lines)
    return f"{rows}{made.folder}: {sum(made.sizes.values()) / 1e6:.1f} MB, digest {made.digest}\n"


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    names = [profile.name for profile in PROFILES.values() if profile.graph != FP32_GRAPH]
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--profile", nargs="+", choices=names, help="what to build")
    what.add_argument("--key", action="store_true", help="print the key of this machine's engines, and end")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="models to build (default: all)")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="DIR",
        help="calibration set (default: made beside the repository)",
    )
    parser.add_argument(
        "--engines",
        type=Path,
        metavar="DIR",
        help="build in a copy, DIR/KEY/model_repository, for `serve --engines`",
    )
    parser.add_argument(
        "--wait", action="store_true", help="with --engines: wait until another process has built it"
    )
    parser.add_argument("--graphs", action="store_true", help="graphs alone, no TensorRT plans: needs no GPU")
    parser.add_argument("--again", action="store_true", help="build what is there and fits, too")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write quality, speed and kept layers to FILE.html or .md"
    )
    parser.add_argument(
        "--curve", action="store_true", help="measure the loss over layers kept, and each layer's share of it"
    )
    parser.add_argument("--version-compatible", action="store_true", help="plans for newer TensorRT versions")
    parser.add_argument("--workspace", type=int, metavar="MIB", help="scratch memory of a TensorRT kernel")


def _build(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.engine_store import begin_repository, engine_key

    if args.key:
        sys.stdout.write(f"{engine_key(args.repository)}\n")
        return 0
    if args.wait:
        return _wait(args)
    if args.engines is not None:
        args.repository = begin_repository(args.repository, args.engines, engine_key(args.repository))
    return _build_profiles(args)


def _wait(args: argparse.Namespace) -> int:
    """Return when the engines of every profile are there; whoever started this limits the time."""
    from cosytriton_ensemble.engine_store import engine_key, engine_repository
    from cosytriton_ensemble.repository import check_repository

    if args.engines is None:
        raise InputError("--wait needs --engines DIR, where another process builds.")
    key, told = engine_key(args.repository), ""
    while True:
        try:
            repository = engine_repository(args.engines, key)
            for name in args.profile:
                check_repository(repository, PROFILES[name])
            return 0
        except RepositoryError as error:
            if told != (told := str(error)):
                log.info("waiting: %s", error)
            time.sleep(WAIT_SECONDS)


def _build_profiles(args: argparse.Namespace) -> int:
    from cosytriton_engines.build import Build, check_models, models_of
    from cosytriton_engines.calibration.sets import make_set, open_set
    from cosytriton_engines.engine.builder import EngineOptions
    from cosytriton_engines.engine.plans import PlanBuilder
    from cosytriton_engines.report.measured import report_of, stage_reports
    from cosytriton_engines.report.writer import check_name, write_report
    from cosytriton_ensemble.pipeline import pipeline_of
    from cosytriton_ensemble.repository import family_of

    logging.getLogger("onnx_ir").setLevel(logging.WARNING)  # it tells of every pass
    profiles = [PROFILES[name] for name in args.profile]
    plans = None
    if args.report is not None:
        check_name(args.report)
    if not args.graphs and any(profile.plan for profile in profiles):
        cache = args.repository.absolute().parent / "timing.cache"
        plans = PlanBuilder.here(EngineOptions(cache, args.workspace, args.version_compatible))
    pipeline = pipeline_of(family_of(args.repository))
    for profile in profiles:
        check_models(args.models or (), models_of(pipeline, profile, plans=plans is not None))
    folder = args.calibration or args.repository.absolute().parent / "calibration"
    if args.calibration is None and not folder.exists():
        make_set(args.repository, folder, progress=log.info)
    calibration = open_set(folder)
    for warning in calibration.warnings:
        log.warning("warning: %s", warning)
    stages = []
    for profile in profiles:
        build = Build(args.repository, profile, calibration, plans=plans, curve=args.curve, progress=log.info)
        built = build.run(args.models, args.again or args.report is not None)
        sys.stdout.write("".join(f"{one}\n" for one in built))
        stages += stage_reports(built, profile, log.info) if args.report is not None else []
    if args.report is not None:
        write_report(report_of(args.repository, calibration, stages), args.report)
        sys.stdout.write(f"{args.report}\n")
    return 0


def _gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="models to ask about (default: all)")


def _gate(args: argparse.Namespace) -> int:
    from cosytriton_engines.engine.gate import gate_repository

    failed = False
    sys.stdout.write(
        f"{'model':<18}{'graph':<24}{'parse s':>8}{'build s':>8}{'plan MB':>9}{'peak MiB':>10}\n"
    )
    for model, graph, answer in gate_repository(args.repository, args.models):
        if isinstance(answer, CosytritonError):
            failed = True
            figures = f"  refused: {answer}"
        else:
            times = f"{answer.parse_seconds:>8.1f}{answer.build_seconds:>8.1f}"
            figures = f"{times}{answer.plan_bytes / 1e6:>9.1f}{answer.peak_mib:>10}"
        sys.stdout.write(f"{model:<18}{graph:<24}{figures}\n")
        sys.stdout.flush()
    return int(failed)


GATE = Command("let TensorRT-RTX parse and build every graph, without a GPU", _gate_arguments, _gate)
BUILD = Command("make the INT8 and FP16 graphs and TensorRT plans of profiles", _build_arguments, _build)
CALIBRATE = Command(
    "run speech and text through the pipeline for calibration", _calibrate_arguments, _calibrate
)
