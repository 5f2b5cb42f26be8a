"""The highest rate of requests that still keeps the limits, found by short load tests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.run import LoadOptions, run_load
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.slo import Verdict, judge

log = logging.getLogger(__name__)

FILE = "capacity.json"


@dataclass(frozen=True, slots=True)
class Bracket:
    """How the rate is searched; all rates in requests a second.

    Attributes:
        start: the first rate that is tried.
        growth: by which it grows until the limits are missed, or shrinks until they are kept.
        precision: relative width of the interval that the search ends with.
        steps: how often the rate grows or shrinks at most.
    """

    start: float = 1.0
    growth: float = 2.0
    precision: float = 0.1
    steps: int = 12


@dataclass(frozen=True, slots=True)
class CapacityOptions:
    """How capacity is measured.

    Attributes:
        bracket: of the search.
        seconds: of each probe.
        narrow: a probe that misses its worst limit by no more than this share may have had bad luck.
        tries: probes at one such rate at most; the majority counts.
    """

    bracket: Bracket = field(default_factory=Bracket)
    seconds: float = 30.0
    narrow: float = 0.25
    tries: int = 3


Run = Callable[[LoadOptions, Path], RunFolder]
Judge = Callable[[RunFolder, Limits], Verdict]


@dataclass(frozen=True, slots=True)
class Probe:
    """A short load test.

    Attributes:
        rate: intended requests a second.
        folder: its name.
        passed: whether the limits were kept.
        strain: of the limit that was closest or missed most: 1 at the limit, more beyond it.
        reason: the verdict in one line.
    """

    rate: float
    folder: str
    passed: bool
    strain: float
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The highest `rate` that passed, and the lowest `missed` above it; None: none was missed."""

    rate: float
    missed: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a server carries: `Found`, and every probe in its order."""

    rate: float
    missed: float | None
    probes: tuple[Probe, ...]

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def find_capacity(
    base: LoadOptions,
    limits: Limits,
    folder: Path,
    options: CapacityOptions | None = None,
    *,
    run: Run = run_load,
    judge: Judge = judge,
) -> Capacity:
    """Search the highest rate of an open loop that keeps the limits.

    A probe that misses them narrowly is repeated, with other requests, until most of its tries agree.

    Args:
        base: the load; its loop, rate, length and seed are those of the probes.
        limits: what is promised.
        folder: for a folder of each probe, and `capacity.json`.
        options: of the search.
        run: makes the load of a probe.
        judge: judges it.

    Raises:
        LoadTestError: the limits are missed at any rate, or a probe could not be run.
    """
    options = options or CapacityOptions()
    prober = _Prober(base, limits, folder, options, run, judge)
    found = search(prober.meets, options.bracket)
    capacity = Capacity(found.rate, found.missed, tuple(prober.probes))
    capacity.write(folder / FILE)
    return capacity


class _Prober:
    """Runs the probes and remembers them."""

    def __init__(
        self,
        base: LoadOptions,
        limits: Limits,
        folder: Path,
        options: CapacityOptions,
        run: Run,
        judge: Judge,
    ) -> None:
        self._base, self._limits, self._folder, self._options = base, limits, folder, options
        self._run, self._judge = run, judge
        self.probes: list[Probe] = []

    def meets(self, rate: float) -> bool:
        """Whether the limits are kept at a rate; a narrow miss is left to the majority."""
        first = self._probe(rate)
        if first.passed or first.strain > 1 + self._options.narrow:
            return first.passed
        majority, kept, missed = self._options.tries // 2 + 1, 0, 1
        while max(kept, missed) < majority:
            passed = self._probe(rate).passed
            kept, missed = kept + passed, missed + (not passed)
        return kept > missed

    def _probe(self, rate: float) -> Probe:
        number = len(self.probes)
        name = f"{number:02d}_{rate:.3g}"
        load = replace(
            self._base, loop="open", rate=rate, seconds=self._options.seconds, seed=self._base.seed + number
        )
        verdict = self._judge(self._run(load, self._folder / name), self._limits)
        strain = max((row.strain for row in verdict.rows), default=0.0 if verdict.passed else math.inf)
        probe = Probe(rate, name, verdict.passed, strain, verdict.reason)
        log.info("%.3g requests/s: %s: %s", rate, "kept" if probe.passed else "missed", probe.reason)
        self.probes.append(probe)
        return probe


def search(meets: Callable[[float], bool], bracket: Bracket) -> Found:
    """Bracket the highest rate that `meets` the limits, then bisect the interval.

    Rates are halved by ratio: the geometric mean, so that the precision is relative.

    Raises:
        LoadTestError: even the lowest rate misses the limits.
    """
    low: float | None = None
    high: float | None = None
    rate = bracket.start
    for _ in range(bracket.steps):
        if meets(rate):
            low = rate
        else:
            high = rate
        if low is not None and high is not None:
            break
        rate = rate * bracket.growth if high is None else rate / bracket.growth
    if low is None:
        raise LoadTestError(
            f"The limits are missed even at {high:.3g} requests/s, so that the load is not the cause. "
            "Run one user first, and read its verdict."
        )
    while high is not None and high > low * (1 + bracket.precision):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return Found(low, high)
