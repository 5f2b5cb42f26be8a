"""Timing: variants in turn, in one run, so that all of them meet the same state of the machine."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "cpu s", "GB", "tokens/s", "x", "%", ""]


@dataclass(slots=True)
class Stopwatch:
    """What a block of code took: wall-clock seconds, and CPU seconds of this process."""

    seconds: float = 0.0
    cpu: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Time a block; the answer is filled when the block ends."""
    watch, start, cpu = Stopwatch(), time.perf_counter(), time.process_time()
    try:
        yield watch
    finally:
        watch.seconds, watch.cpu = time.perf_counter() - start, time.process_time() - cpu


def time_call(run: Callable[[], object]) -> Stopwatch:
    """Time one call."""
    with timed() as watch:
        run()
    return watch


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: every sample, so that a later run can tell a difference from the noise."""

    unit: Unit
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """What the figure is."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the range of the samples; 0 of a single one."""
        return (max(self.samples) - min(self.samples)) / 2

    @property
    def lower_is_better(self) -> bool:
        """Whether less of it is wanted."""
        return self.unit not in ("tokens/s", "x")


Figures = dict[str, Figure]
"""By name: `case/variant`, where the variant is `eager` or a profile."""

Run = Callable[[], Stopwatch]


def in_turn(case: str, runs: Mapping[str, Run], rounds: int) -> Figures:
    """Measure variants of one case one after another, `rounds` times; each was warmed up before.

    The figures are `case/variant` in seconds and `case:cpu/variant` in CPU seconds.
    """
    watches = defaultdict[str, list[Stopwatch]](list)
    for _ in range(rounds):
        for variant, run in runs.items():
            watches[variant].append(run())
    figures: Figures = {}
    for variant, taken in watches.items():
        figures[f"{case}/{variant}"] = Figure("s", tuple(watch.seconds for watch in taken))
        figures[f"{case}:cpu/{variant}"] = Figure("cpu s", tuple(watch.cpu for watch in taken))
    return figures
