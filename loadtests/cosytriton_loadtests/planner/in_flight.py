"""The language model's in-flight batching, as `llm_engine` does it: requests join and leave between steps."""

from __future__ import annotations

import math
from collections import deque

import simpy

from cosytriton_loadtests.planner.cores import Cores, Precedence, Process
from cosytriton_loadtests.planner.stage_times import StageTimes

BURST_SECONDS = 0.01  # steps within it are one event, so that a simulation takes seconds


class QueueFull(Exception):  # noqa: N818  (what the server calls it)
    """The language model takes no more requests."""


class Generation:
    """The tokens of one piece of text, while they are made.

    Attributes:
        tokens: it will have.
        made: so many are made.
        left: positions of its prompt that are still to be fed.
        wanted: the count that is waited for, `tokens` at most.
        complete: comes when all are made.
    """

    def __init__(self, env: simpy.Environment, tokens: int, positions: float) -> None:
        self._env = env
        self.tokens, self.made, self.left = tokens, 0, positions
        self.wanted, self._grown = tokens, env.event()
        self.complete = env.event()

    @property
    def ended(self) -> bool:
        """Whether all tokens are made."""
        return self.made >= self.tokens

    def wait(self, wanted: float) -> simpy.Event:
        """The event that so many tokens, or all, are made."""
        self.wanted, self._grown = int(min(wanted, self.tokens)), self._env.event()
        if self.made >= self.wanted:
            self._grown.succeed()
        return self._grown

    def grow(self, count: int) -> None:
        """Take new tokens."""
        self.made += count
        if self.made >= self.wanted and not self._grown.triggered:
            self._grown.succeed()
        if self.ended:
            self.complete.succeed()


class InFlightBatch:
    """One language model; its rows share each step.

    It is urgent while a request has no row though there is one, or fewer tokens than a first sound takes.
    """

    def __init__(
        self, env: simpy.Environment, cores: Cores, times: StageTimes, precedence: Precedence
    ) -> None:
        self._env, self._cores, self._times, self._precedence = env, cores, times, precedence
        self._first_sound = times.rates.first_chunk(times.prompt_tokens) + times.rates.lookahead
        self._active: list[Generation] = []
        self._waiting: deque[Generation] = deque()
        self._entering: Generation | None = None
        self._wake = env.event()
        env.process(self._run())

    @property
    def active(self) -> int:
        """Requests that have a row."""
        return len(self._active)

    def submit(self, tokens: int) -> Generation:
        """Queue a request.

        Raises:
            QueueFull: too many are waiting.
        """
        if len(self._active) + len(self._waiting) >= self._times.slots + self._times.max_waiting:
            raise QueueFull
        generation = Generation(self._env, tokens, self._times.prompt_positions)
        self._waiting.append(generation)
        if not self._wake.triggered:
            self._wake.succeed()
        return generation

    def _run(self) -> Process:
        while True:
            if not (self._active or self._waiting):
                self._wake = self._env.event()
                yield self._wake
            yield from self._precedence.turn(self._urgent(), self._work())
            self._active = [one for one in self._active if not one.ended]

    def _urgent(self) -> bool:
        enters = bool(self._waiting) and len(self._active) < self._times.slots
        return enters or any(one.made < self._first_sound for one in self._active)

    def _work(self) -> Process:
        yield from self._feed()
        yield from self._step()

    def _feed(self) -> Process:
        """A part of one prompt: a whole one would hold up the others."""
        if self._entering is None:
            if not self._waiting or len(self._active) >= self._times.slots:
                return
            self._entering = self._waiting.popleft()
            self._active.append(self._entering)
        entering = self._entering
        positions = min(entering.left, self._times.chunk_positions)
        yield self._cores.run(self._times.prefill.work(positions), self._times.prefill.width)
        entering.left -= positions
        if entering.left <= 0:
            self._entering = None
            entering.grow(1)  # the prompt's logits give the first token

    def _step(self) -> Process:
        rows = [one for one in self._active if one is not self._entering and not one.ended]
        if not rows:
            return
        cost = self._times.step
        work = cost.work(len(rows))
        steps = self._steps(rows, work / cost.width)
        yield self._cores.run(steps * work, cost.width)
        for row in rows:
            row.grow(steps)

    def _steps(self, rows: list[Generation], seconds: float) -> int:
        """Steps until somebody waits for their end, but no more than a newcomer may wait for."""
        if self._entering is not None:
            return 1
        goals = ((one, goal) for one in rows for goal in (self._first_sound, one.wanted, one.tokens))
        least = min(goal - one.made for one, goal in goals if goal > one.made)
        longest = math.inf if seconds <= 0 else BURST_SECONDS / seconds
        return max(1, int(min(least, longest)))
