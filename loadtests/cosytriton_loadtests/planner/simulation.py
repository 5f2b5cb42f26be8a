"""Requests that arrive at replicas, and what their listeners meet: the same samples as a load test gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from cosytriton_loadtests.planner.cores import Process
from cosytriton_loadtests.planner.replica import Replica, Speech, Visit
from cosytriton_loadtests.planner.stage_times import StageTimes
from cosytriton_loadtests.samples import Chunk, Sample

STAGE = "steady"


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out.

    Attributes:
        samples: of every request that ended, in the order of arrival.
        utilisation: share of the cores' time that was computed in.
        work: core seconds of a request, on average.
    """

    samples: tuple[Sample, ...]
    utilisation: float
    work: float


def simulate(
    times: StageTimes,
    mix: Sequence[Speech],
    rate: float,
    *,
    replicas: int = 1,
    requests: int = 500,
    seed: int = 0,
) -> Simulated:
    """One of `replicas` servers behind a round robin that `rate` requests a second arrive at, by Poisson.

    Each replica gets every `replicas`-th arrival, so that its own intervals are Erlang's and all replicas
    are alike: one of them tells all, at the cost of one.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.gamma(replicas, 1 / rate, requests))
    speeches = draw(mix, requests, rng)
    env = simpy.Environment()
    replica = Replica(env, times)
    visits: list[Visit] = []

    def arrive() -> Process:
        for at, speech in zip(arrivals, speeches, strict=True):
            yield env.timeout(at - env.now)
            visits.append(visit := Visit(speech, env.now))
            env.process(replica.speak(visit))

    env.process(arrive())
    env.run(float(arrivals[-1]))
    used = replica.cores.used()
    env.run()
    utilisation = used / (times.cores * float(arrivals[-1]))
    return Simulated(tuple(samples_of(visits)), utilisation, replica.cores.used() / requests)


def draw(mix: Sequence[Speech], count: int, rng: np.random.Generator) -> list[Speech]:
    """Requests by their weights."""
    weights = np.array([speech.weight for speech in mix])
    return [mix[index] for index in rng.choice(len(mix), count, p=weights / weights.sum())]


def samples_of(visits: Sequence[Visit], stage: str = STAGE) -> Iterator[Sample]:
    """The samples that listeners would have taken."""
    for visit in visits:
        speech = visit.speech
        chunks = tuple(
            Chunk(at, seconds, speech.audible if index == 0 else 0.0)
            for index, (at, seconds) in enumerate(visit.chunks)
        )
        yield Sample(
            scenario=speech.scenario,
            stage=stage,
            protocol=speech.protocol,
            request={},
            intended=visit.came,
            sent=visit.came,
            ended=visit.ended,
            chunks=chunks,
            tokens=sum(speech.pieces),
            error="OverloadedError" if visit.refused else "",
        )
