"""Two runs side by side: what differs beyond the noise.

The noise within the runs is bootstrapped (Efron 1979): both are drawn anew with replacement, and the
difference of the medians counts when zero is outside the middle 95 % of such differences. Differences below
`LEAST_CHANGE` never count: so much do runs of the same server differ on a machine that others use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cosytriton_loadtests import playback, statistics
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample

LEAST_CHANGE = 0.1  # of the earlier median
CONFIDENCE = 0.95
DRAWS = 1000
LEAST_SAMPLES = 5  # of each run, below which nothing is said
FIGURES: Mapping[str, Callable[[Sample], float | None]] = {
    "first_audio": statistics.first_audio,
    "first_audible": playback.first_audible,
    "whole": statistics.whole,
    "rtf": statistics.rtf,
}


@dataclass(frozen=True, slots=True)
class Change:
    """Medians of one figure in one scenario; all of these figures are better when they are lower.

    Attributes:
        figure: a key of `FIGURES`.
        scenario: whose requests.
        before, now: the medians.
        low, high: ends of the interval in which 95 % of the bootstrapped differences lie.
    """

    HEAD: ClassVar = ("figure", "scenario", "before", "now", "change", "interval of the difference", "")

    figure: str
    scenario: str
    before: float
    now: float
    low: float
    high: float

    @property
    def beyond_noise(self) -> bool:
        """Whether zero is outside the interval, and the difference is not small."""
        small = abs(self.now - self.before) < LEAST_CHANGE * abs(self.before)
        return not small and not self.low <= 0 <= self.high

    @property
    def worse(self) -> bool:
        """Whether it became worse beyond the noise."""
        return self.beyond_noise and self.now > self.before

    @property
    def word(self) -> str:
        """The judgement."""
        return "same" if not self.beyond_noise else "worse" if self.worse else "better"

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row below `HEAD`."""
        ratio = f"{self.now / self.before - 1:+.0%}" if self.before else "-"
        interval = f"{self.low:+.3g} to {self.high:+.3g}"
        return self.figure, self.scenario, f"{self.before:.3g}", f"{self.now:.3g}", ratio, interval, self.word

    def __str__(self) -> str:
        return "{6}: median {0} of {1} {2} -> {3} ({4}, difference {5})".format(*self.cells)


def changes(before: RunFolder, now: RunFolder) -> list[Change]:
    """Every figure of every scenario that both runs have, those that became worse first.

    Raises:
        LoadTestError: a folder holds no run.
    """
    found = _changes(_scenarios(before), _scenarios(now))
    return sorted(found, key=lambda change: ("worse", "better", "same").index(change.word))


def _changes(before: dict[str, list[Sample]], now: dict[str, list[Sample]]) -> Iterator[Change]:
    for scenario in sorted(before.keys() & now.keys()):
        for figure, read in FIGURES.items():
            old, new = (_values(read, samples[scenario]) for samples in (before, now))
            if min(len(old), len(new)) >= LEAST_SAMPLES:
                low, high = interval(old, new)
                yield Change(figure, scenario, float(np.median(old)), float(np.median(new)), low, high)


def interval(before: npt.NDArray[np.float64], now: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Percentile bootstrap of the difference of the medians, `now` - `before`; the same each time."""
    rng = np.random.default_rng(0)
    old, new = (np.median(rng.choice(values, (DRAWS, len(values))), axis=1) for values in (before, now))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(new - old, (tail, 1 - tail))
    return float(low), float(high)


def _scenarios(folder: RunFolder) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in folder.samples():
        found.setdefault(sample.scenario, []).append(sample)
    return found


def _values(read: Callable[[Sample], float | None], samples: list[Sample]) -> npt.NDArray[np.float64]:
    return np.array([value for value in map(read, samples) if value is not None])
