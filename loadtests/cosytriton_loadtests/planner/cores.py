"""Cores that stages share: side by side they slow each other, unless who is urgent goes first."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]

_DONE = 1e-9  # seconds of work that are none: floating-point time does not come out even


@dataclass(slots=True, eq=False)
class _Job:
    left: float  # core seconds
    width: float
    done: simpy.Event
    rate: float = 0.0  # cores that it has now


class Cores:
    """Processor sharing with widths, the fluid limit of the scheduler's fair queueing.

    A job of width 2 computes on two cores at once where they are free. Where all together want more than
    there is, each gets the same, and no more than its width (max-min fairness; Parekh and Gallager, "A
    generalized processor sharing approach to flow control", 1993).

    Args:
        env: The simulation.
        count: How many cores there are.
        slowdown: How much longer work takes on all cores at once than on one: they share caches and memory.

    """

    def __init__(self, env: simpy.Environment, count: float, slowdown: float = 1.0) -> None:
        self._env, self._count, self._slowdown = env, count, slowdown
        self._jobs: list[_Job] = []
        self._since = env.now
        self._version = 0
        self._busy = self._used = 0.0

    def run(self, work: float, width: float = 1.0) -> simpy.Event:
        """Do `work` core seconds on at most `width` cores; the event comes when it is done."""
        job = _Job(work, width, self._env.event())
        self._advance()
        if work <= _DONE:
            job.done.succeed()
        else:
            self._jobs.append(job)
            self._share()
        return job.done

    def used(self) -> float:
        """Core seconds until now in which something was computed."""
        self._advance()
        return self._used

    def _advance(self) -> None:
        """Account for what was done since the last change."""
        elapsed = self._env.now - self._since
        self._since = self._env.now
        self._used += self._busy * elapsed
        for job in self._jobs:
            job.left -= job.rate * elapsed

    def _share(self) -> None:
        """Give each job its cores until the next one ends or comes."""
        self._version += 1
        if not self._jobs:
            self._busy = 0.0
            return
        self._busy = allot(self._jobs, self._count)
        for job in self._jobs:
            job.rate /= self._pace()
        soonest = min(job.left / job.rate for job in self._jobs)
        timer = self._env.timeout(max(0.0, soonest), value=self._version)
        assert timer.callbacks is not None  # it has not come yet
        timer.callbacks.append(self._end)

    def _pace(self) -> float:
        """How much longer work takes with so many cores busy; what one job costs alone is known as such."""
        if len(self._jobs) < 2 or self._count <= 1:
            return 1.0
        return 1 + (self._slowdown - 1) * max(0.0, (self._busy - 1) / (self._count - 1))

    def _end(self, timer: simpy.Event) -> None:
        if timer.value != self._version:
            return  # another job came or ended in the meantime
        self._advance()
        ended = [job for job in self._jobs if job.left <= _DONE]
        self._jobs = [job for job in self._jobs if job.left > _DONE]
        self._share()
        for job in ended:
            job.done.succeed()


def allot(jobs: list[_Job], count: float) -> float:
    """Set each job's cores; how many are busy. Who wants less than his share leaves it to the others."""
    left = count
    for served, job in enumerate(sorted(jobs, key=lambda job: job.width)):
        job.rate = min(job.width, left / (len(jobs) - served))
        left -= job.rate
    return count - left


class Precedence:
    """Who is not urgent waits before the next work while anybody is, as in the server's `turns`."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env, self._urgent, self._calm = env, 0, env.event()

    def turn(self, urgent: bool, work: Process) -> Process:
        """Do the work: at once, or when nobody is urgent."""
        while self._urgent and not urgent:
            yield self._calm
        self._urgent += urgent
        yield from work
        self._urgent -= urgent
        if urgent and not self._urgent:
            self._calm.succeed()
            self._calm = self._env.event()
