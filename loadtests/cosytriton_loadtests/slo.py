"""Whether a run kept its limits: a verdict with its reason in one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cosytriton_loadtests import causes, statistics
from cosytriton_loadtests.limits import AT_LEAST, DIFFERENT, MEMORY, SECONDS, SHARED_MEMORY, Limits
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.server_figures import SHM, Growth, between, growth
from cosytriton_loadtests.server_watch import Look, read_looks

__all__ = ["Limits", "Row", "Verdict", "judge", "judge_summaries", "warm_looks", "write_differences"]

DIFFERENCES = "differences.json"  # beside the run's other files

SETTLED = 180.0  # seconds after which memory shall not grow: until then caches and arenas fill
LEAST_WATCH = 60.0  # seconds of looks behind that, without which nothing can be said about growth
WRONG = (DIFFERENT, "errors")  # what is said first: a wrong answer is worse than a late one
LATE = {"RequestTimeoutError", "OverloadedError"}  # errors that are a matter of time


@dataclass(frozen=True, slots=True)
class Row:
    """One limit and what was measured.

    Attributes:
        measure: its name.
        place: scenario, stage and protocol; "" for the run.
        measured: None when it could not be measured.
        limit: what was promised.
    """

    measure: str
    place: str
    measured: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        """Whether the limit was kept; None when it could not be measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self._at_least else self.measured <= self.limit

    @property
    def strain(self) -> float:
        """How much of the limit was used: 1 at the limit, more beyond it."""
        if self.measured is None:
            return 0.0
        part, whole = (self.limit, self.measured) if self._at_least else (self.measured, self.limit)
        return part / whole if whole else float("inf") if part else 0.0

    @property
    def figure(self) -> str:
        """What was measured, with its unit."""
        return "not measured" if self.measured is None else f"{self.measured:.3g}{self._unit}"

    @property
    def allowed(self) -> str:
        """The limit, with its unit."""
        return f"{'at least' if self._at_least else 'at most'} {self.limit:.3g}{self._unit}"

    def __str__(self) -> str:
        place = f" of {self.place}" if self.place else ""
        return f"{self.measure}{place} is {self.figure}, allowed {self.allowed}"

    @property
    def _at_least(self) -> bool:
        return self.measure in AT_LEAST

    @property
    def _unit(self) -> str:
        return " s" if self.measure.startswith(SECONDS) else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the limits were kept, why in one line, and every limit, those that were missed first."""

    passed: bool
    reason: str
    rows: tuple[Row, ...] = ()


def judge(folder: RunFolder, limits: Limits, baseline: RunFolder | None = None) -> Verdict:
    """Judge a run; the reason names the cause, compared with the baseline's server where there is one.

    Raises:
        LoadTestError: the folder holds no run, or no request was intended behind its warm-up.
    """
    summaries = statistics.of_run(folder, limits.promise)
    return _verdict(summaries, _Evidence.of(folder, baseline), limits)


def judge_summaries(summaries: Sequence[statistics.Summary], limits: Limits) -> Verdict:
    """Judge figures of requests without a server that was watched, such as those of a simulation."""
    return _verdict(summaries, _Evidence([], [], [], [], None), limits)


def _verdict(summaries: Sequence[statistics.Summary], evidence: _Evidence, limits: Limits) -> Verdict:
    rows = sorted([*_of_requests(summaries, limits), *_of_run(evidence, limits)], key=_urgency)
    missed = [row for row in rows if row.met is False]
    if missed:
        further = f"; missed with it: {len(missed) - 1} more" if missed[1:] else ""
        return Verdict(False, f"{missed[0]}: {evidence.cause(missed[0])}{further}", tuple(rows))
    met = [row for row in rows if row.met]
    if not met:
        return Verdict(False, "no limit could be measured", tuple(rows))
    unknown = f", {len(rows) - len(met)} could not be measured" if rows[len(met) :] else ""
    return Verdict(True, f"{len(met)} limits are kept{unknown}; the closest: {met[0]}", tuple(rows))


def warm_looks(folder: RunFolder) -> list[Look]:
    """What the server was seen to do behind the warm-up."""
    info = folder.info()
    begin = info.stages[0].start + info.warm_up if info.stages else 0.0
    return between(read_looks(folder.server_file), begin)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What a verdict is founded on beside the statistics.

    Attributes:
        samples, looks, baseline: behind the warm-up.
        grown: memory, once it had settled; empty when nobody watched for long enough.
        differences: in words; None when no answer was checked.
    """

    samples: Sequence[Sample]
    looks: Sequence[Look]
    baseline: Sequence[Look]
    grown: Sequence[Growth]
    differences: Sequence[str] | None

    @classmethod
    def of(cls, folder: RunFolder, baseline: RunFolder | None) -> _Evidence:
        """Read it."""
        looks = read_looks(folder.server_file)
        settled = [look for look in looks if look.at >= looks[0].at + SETTLED]
        watched = settled[-1].at - settled[0].at if settled else 0.0
        return cls(
            list(folder.samples()),
            warm_looks(folder),
            warm_looks(baseline) if baseline else [],
            growth(settled) if watched >= LEAST_WATCH else [],
            read_differences(folder),
        )

    def measured(self, measure: str) -> float | None:
        """A figure of the run."""
        if measure == DIFFERENT:
            return None if self.differences is None else float(len(self.differences))
        return max((one.share for one in self._grown(measure)), default=None)

    def cause(self, row: Row) -> str:
        """Why a limit was missed."""
        if row.measure in (MEMORY, SHARED_MEMORY):
            return causes.of_growth(self._grown(row.measure))
        if row.measure == DIFFERENT:
            return (self.differences or [""])[0]
        if row.measure != "errors":
            return causes.of_time(self.looks, self.baseline)
        failed = [one for one in self.samples if statistics.failed(one)]
        late = any(one.error in LATE for one in failed)
        return causes.of_errors(failed) + (f"; {causes.of_time(self.looks, self.baseline)}" if late else "")

    def _grown(self, measure: str) -> list[Growth]:
        return [one for one in self.grown if (one.name == SHM) == (measure == SHARED_MEMORY)]


def write_differences(folder: RunFolder, differences: Iterable[object]) -> None:
    """Note what `quality.check` found, in words, for the verdict."""
    lines = [str(difference) for difference in differences]
    (folder.path / DIFFERENCES).write_text(json.dumps(lines, ensure_ascii=False, indent=1), encoding="utf-8")


def read_differences(folder: RunFolder) -> list[str] | None:
    """Answers that were other ones when they were asked for alone; None when nobody asked."""
    path = folder.path / DIFFERENCES
    if not path.is_file():
        return None
    lines: list[str] = json.loads(path.read_text(encoding="utf-8"))
    return lines


def _of_requests(summaries: Sequence[statistics.Summary], limits: Limits) -> Iterator[Row]:
    _, *summaries = summaries  # the first is over all stages
    for summary in summaries:
        for measure, limit in limits.of(summary).items():
            yield Row(measure, summary.place, summary.value(measure), limit)
    met = {name for summary in summaries for name in (summary.scenario, summary.stage)}
    for name, given in {**limits.scenario, **limits.stage}.items():
        if name not in met:  # a wrong name must not look like a limit that is kept
            yield from (Row(measure, name, None, limit) for measure, limit in given.items())


def _of_run(evidence: _Evidence, limits: Limits) -> Iterator[Row]:
    for measure, limit in limits.run.items():
        yield Row(measure, "", evidence.measured(measure), limit)


def _urgency(row: Row) -> tuple[int, int, float]:
    """What went wrong before what came late, what was missed before what was kept, the worst first."""
    wrong = row.met is False and row.measure in WRONG
    return (False, True, None).index(row.met), WRONG.index(row.measure) if wrong else len(WRONG), -row.strain
