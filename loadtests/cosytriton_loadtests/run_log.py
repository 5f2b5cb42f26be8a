"""Writes the folder of a run while it goes on: `run.json` at each stage, `samples.jsonl` as samples come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cosytriton_loadtests.run_folder import RunFolder, RunInfo, Stage
from cosytriton_loadtests.samples import Sample, write_samples
from cosytriton_loadtests.shapes import Planned

WARM_UP = 0.1  # of the run, unless another one is asked for


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a run at its start.

    Attributes:
        info: without stages.
        interval: mean seconds between the requests of a user in an open loop; None in a closed one.
        warm_up: seconds; None: `WARM_UP` of the run.
    """

    info: RunInfo
    interval: float | None = None
    warm_up: float | None = None


class RunLog:
    """The log of one run after another, as Locust's web page starts them; a new one replaces the last.

    Args:
        folder: None: nothing is written.
        ask: called at the start of each run, because the web page changes options.
    """

    def __init__(self, folder: RunFolder | None, ask: Callable[[], Told]) -> None:
        self._folder, self._ask = folder, ask
        self._stages: list[Stage] = []
        self._ended = True

    def stage_began(self, stage: Planned, at: float) -> None:
        """A stage begins at that time, in seconds since the epoch, and ends the one before."""
        if self._ended:
            self._told, self._stages, self._ended = self._ask(), [], False
            if self._folder is not None:
                self._folder.path.mkdir(parents=True, exist_ok=True)
                self._folder.samples_file.write_bytes(b"")
        elif self._stages[-1].name == stage.name:
            return  # Locust's master begins twice
        self._close_stage(at)
        rate = stage.users / self._told.interval if self._told.interval else None
        self._stages.append(Stage(stage.name, at, stage.seconds, stage.users, rate))
        self._write_info()

    def ended(self) -> None:
        """No more requests are sent."""
        if not self._ended:
            self._close_stage(time.time())
            self._ended = True
            self._write_info()

    def write(self, samples: Iterable[Sample]) -> None:
        """Append samples, each with the stage in which it was intended."""
        if self._folder is not None:
            write_samples(self._folder.samples_file, [self._staged(sample) for sample in samples])

    def _staged(self, sample: Sample) -> Sample:
        begun = [stage.name for stage in self._stages if stage.start <= sample.intended]
        return replace(sample, stage=begun[-1] if begun else self._stages[0].name)

    def _close_stage(self, at: float) -> None:
        if self._stages:
            last = self._stages[-1]
            self._stages[-1] = replace(last, seconds=at - last.start)

    def _write_info(self) -> None:
        if self._folder is not None:
            warm_up = self._told.warm_up
            if warm_up is None:
                warm_up = WARM_UP * sum(stage.seconds for stage in self._stages)
            self._folder.write_info(replace(self._told.info, stages=tuple(self._stages), warm_up=warm_up))
