"""How many replicas a rate of requests takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosytriton_loadtests.capacity import Bracket, search
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.simulation import STAGE, simulate
from cosytriton_loadtests.planner.stage_times import StageTimes
from cosytriton_loadtests.run_folder import RunInfo, Stage
from cosytriton_loadtests.slo import Limits, judge_summaries
from cosytriton_loadtests.statistics import summarise

MOST_REPLICAS = 1000
LEAST_REQUESTS, TRIES = 10, 15  # of short load tests that are simulated
PRECISION = 0.03  # of a simulated capacity
WARM_UP = 0.1  # share of the simulated time: the servers begin empty


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be expected of so many replicas.

    Attributes:
        replicas: behind a round robin.
        rate: requests a second of all of them.
        first_audio_p50, first_audio_p95: seconds.
        c100: share of requests without an underrun of more than 100 ms.
        worst_underrun: the longest, in seconds.
        refused: share of requests.
        utilisation: share of the cores' time.
        active: requests that one replica is busy with, on average (Little's law).
        passed: whether the limits are kept.
        reason: why.
    """

    replicas: int
    rate: float
    first_audio_p50: float
    first_audio_p95: float
    c100: float
    worst_underrun: float
    refused: float
    utilisation: float
    active: float
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What each number of replicas would do, up to the first that keeps the limits."""

    outlooks: tuple[Outlook, ...]

    @property
    def replicas(self) -> int:
        """The least number that keeps the limits."""
        return next(outlook.replicas for outlook in self.outlooks if outlook.passed)


def plan(
    times: StageTimes,
    rate: float,
    mix: Sequence[Speech],
    limits: Limits,
    *,
    most: int = MOST_REPLICAS,
    requests: int = 1000,
    seed: int = 0,
) -> Plan:
    """Find the least number of replicas.

    Args:
        times: of a replica's stages.
        rate: requests a second that come.
        mix: what is asked for.
        limits: what is promised.
        most: replicas that are tried.
        requests: that are simulated for each number.
        seed: of the arrivals and the choices.

    Raises:
        LoadTestError: the rate is none, the mix is empty, or not even `most` replicas keep the limits.
    """
    outlooks: list[Outlook] = []
    for replicas in range(1, most + 1):
        outlooks.append(look_out(times, rate, mix, limits, replicas=replicas, requests=requests, seed=seed))
        if outlooks[-1].passed:
            return Plan(tuple(outlooks))
    raise LoadTestError(
        f"Even {most} replicas miss the limits at {rate:g} requests/s: {outlooks[-1].reason}. If one request "
        "alone does, no number of replicas helps: choose other limits or a faster profile."
    )


def look_out(
    times: StageTimes,
    rate: float,
    mix: Sequence[Speech],
    limits: Limits,
    *,
    replicas: int = 1,
    requests: int = 1000,
    seed: int = 0,
) -> Outlook:
    """What so many replicas would do; arguments and errors as in `plan`. The tests' own judge judges."""
    if not (rate > 0 and mix):
        raise LoadTestError(
            f"{rate:g} requests/s and {len(mix)} kinds of requests: give more than none of each."
        )
    simulated = simulate(times, mix, rate, replicas=replicas, requests=requests, seed=seed)
    begin = simulated.samples[int(WARM_UP * requests)].intended
    end = simulated.samples[-1].intended
    info = RunInfo("simulated", "", "open", begin, (Stage(STAGE, 0.0, end, 1),))
    heard, *_ = summaries = summarise(simulated.samples, info, limits.promise)
    verdict = judge_summaries(summaries, limits)
    first, underrun = heard.first_audio, heard.worst_underrun
    return Outlook(
        replicas=replicas,
        rate=rate,
        first_audio_p50=first.p50 if first else math.inf,
        first_audio_p95=first.p95 if first else math.inf,
        c100=heard.c100 or 0.0,
        worst_underrun=underrun.max if underrun else math.inf,
        refused=heard.errors,
        utilisation=simulated.utilisation,
        active=rate / replicas * float(np.mean([one.ended - one.intended for one in simulated.samples])),
        passed=verdict.passed,
        reason=verdict.reason if verdict.passed else str(verdict.rows[0]),
    )


def capacity(
    times: StageTimes,
    mix: Sequence[Speech],
    limits: Limits,
    start: float = 1.0,
    *,
    requests: int = 1000,
    seconds: float | None = None,
) -> float:
    """The highest rate, in requests a second, that one replica carries within the limits.

    Args:
        times: of its stages.
        mix: as in `plan`.
        limits: what is promised.
        start: the first rate that is tried.
        requests: that are simulated at each rate.
        seconds: of load tests that it is to be compared with, instead: too much load takes time to be seen.
            Most of several such tests must keep the limits.

    Raises:
        LoadTestError: it carries none.
    """

    def meets(rate: float) -> bool:
        if seconds is None:
            return look_out(times, rate, mix, limits, requests=requests).passed
        count = max(LEAST_REQUESTS, round(rate * seconds))
        looks = (look_out(times, rate, mix, limits, requests=count, seed=seed) for seed in range(TRIES))
        return sum(look.passed for look in looks) > TRIES / 2

    return search(meets, Bracket(start, precision=PRECISION)).rate
