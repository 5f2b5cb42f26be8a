"""What a build found, as the stages of a report: measured figures, speed, floor and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cosytriton_engines.build import Built
from cosytriton_engines.calibration.sets import CalibrationSet
from cosytriton_engines.calibration.stream_feeds import StreamFeeds
from cosytriton_engines.precision.variant import Progress, smallest
from cosytriton_engines.quality.evaluate import Graph, floor, speed_ratio
from cosytriton_engines.report.pictures import Picture, picture_of
from cosytriton_engines.report.report import Machine, Report, StageReport
from cosytriton_ensemble import machine
from cosytriton_ensemble.manifest import identity_of
from cosytriton_ensemble.profiles import Profile
from cosytriton_ensemble.spec import Feed

REPEATS = 3


def stage_reports(built: Iterable[Built], profile: Profile, progress: Progress) -> list[StageReport]:
    """Measure what is shown of each variant beside its quality.

    Graphs for GPUs are not timed, and FP32's floor on this CPU says nothing about them.
    """
    return [_stage_report(one, profile, progress) for one in built]


def _stage_report(built: Built, profile: Profile, progress: Progress) -> StageReport:
    model, variant = built.model, built.variant
    progress(f"{model}: floor, speed and pictures")
    feed = smallest(built.calibration.judging(model))
    alone = isinstance(built.calibration, StreamFeeds)  # its rows cannot change places
    ratio = None if profile.gpu else speed_ratio(built.source, built.path, [feed], REPEATS)
    return StageReport(
        model,
        profile.precision,
        built.path.name,
        megabytes(built.path),
        megabytes(built.source),
        variant.figures,
        {} if profile.gpu or alone else floor(model, built.source, [feed]),
        ratio,
        variant.kept,
        variant.outcome.trials,
        variant.sensitivity,
        _picture(built, feed),
    )


def _picture(built: Built, feed: Feed) -> Picture | None:
    return picture_of(built.model, Graph(built.source)(feed), Graph(built.path)(feed))


def megabytes(path: Path) -> float:
    """A graph with the weights beside it, in 10^6 bytes."""
    files = (path, path.with_name(f"{path.name}.data"))
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def report_of(repository: Path, calibration: CalibrationSet, stages: Sequence[StageReport]) -> Report:
    """The report of a repository's variants, of today."""
    identity = identity_of(repository)
    return Report(
        identity.checkpoint,
        identity.family,
        identity.untrained,
        calibration.digest,
        calibration.warnings,
        Machine.here(gpu=machine.Machine.here().gpu or ""),
        datetime.now(UTC).strftime("%Y-%m-%d"),
        tuple(stages),
    )
