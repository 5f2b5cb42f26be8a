"""Cores against the formulas of queueing theory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import simpy

from cosytriton_loadtests.planner.cores import Cores, Precedence, Process

COUNT = 12_000
RATE = 6.0  # arrivals a second; jobs of 0.1 s on average: a load of 0.6
MEAN = 0.1


def sojourn(works: npt.NDArray[np.float64], cores: float = 1) -> float:
    """Mean time in the system of jobs that arrive by Poisson, RATE a second."""
    env = simpy.Environment()
    shared, times = Cores(env, cores), []

    def job(work: float) -> Process:
        begun = env.now
        yield shared.run(work)
        times.append(env.now - begun)

    def arrive() -> Process:
        for work, pause in zip(
            works, np.random.default_rng(7).exponential(1 / RATE, len(works)), strict=True
        ):
            yield env.timeout(pause)
            env.process(job(work))

    env.process(arrive())
    env.run()
    return float(np.mean(times))


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.exponential(MEAN, COUNT),
        lambda _: np.full(COUNT, MEAN),
        lambda rng: rng.choice([MEAN / 2, 3 * MEAN], COUNT, p=[0.8, 0.2]),
    ],
    ids=["exponential", "constant", "two sizes"],
)
def test_a_shared_core_is_the_processor_sharing_queue(
    draw: Callable[[np.random.Generator], npt.NDArray[np.float64]],
) -> None:
    """M/G/1-PS: the mean does not depend on the distribution, E[S] / (1 - load)."""
    assert sojourn(draw(np.random.default_rng(3))) == pytest.approx(MEAN / (1 - RATE * MEAN), rel=0.06)


def test_two_cores_are_the_queue_with_two_servers() -> None:
    """M/M/2: jobs of one core share two exactly as Erlang's formula says (PS and FIFO have one mean here)."""
    load = RATE * 2 * MEAN / 2
    works = np.random.default_rng(3).exponential(2 * MEAN, COUNT)
    assert sojourn(works, cores=2) == pytest.approx(2 * MEAN / (1 - load**2), rel=0.06)


def finish(cores: Cores, env: simpy.Environment, *jobs: tuple[float, float]) -> list[float]:
    """When jobs (work, width) that begin together end."""
    ends = [0.0] * len(jobs)

    def one(index: int) -> Process:
        yield cores.run(*jobs[index])
        ends[index] = env.now

    for index in range(len(jobs)):
        env.process(one(index))
    env.run()
    return ends


def test_a_wide_job_takes_what_others_leave() -> None:
    env = simpy.Environment()
    # Two cores: the narrow one has one of them for its second; then the wide one has both.
    assert finish(Cores(env, 2), env, (1, 1), (3, 2)) == pytest.approx([1, 2])


def test_a_core_too_few_is_shared_and_what_a_narrow_job_leaves_is_not_lost() -> None:
    env = simpy.Environment()
    # Half a core for the narrow one and 1.25 for each of the others, which then have 1.5.
    assert finish(Cores(env, 3), env, (0.5, 0.5), (2.75, 2), (2.75, 2)) == pytest.approx([1, 2, 2])


def test_jobs_side_by_side_slow_each_other_and_one_alone_does_not() -> None:
    env = simpy.Environment()
    assert finish(Cores(env, 2, slowdown=1.5), env, (1, 1), (1, 1)) == pytest.approx([1.5, 1.5])
    env = simpy.Environment()
    assert finish(Cores(env, 2, slowdown=1.5), env, (2, 2)) == pytest.approx([1])


def test_work_that_is_done_is_work_that_was_given() -> None:
    env = simpy.Environment()
    cores = Cores(env, 2)
    finish(cores, env, (1, 1), (3, 2), (0.5, 1), (0, 1))
    assert cores.used() == pytest.approx(4.5)


def test_who_is_not_urgent_waits_before_the_next_work_while_anybody_is() -> None:
    env = simpy.Environment()
    precedence, ends = Precedence(env), {}

    def work(name: str, urgent: bool, begin: float) -> Process:
        yield env.timeout(begin)
        yield from precedence.turn(urgent, take(1.0))
        ends[name] = env.now

    def take(seconds: float) -> Process:
        yield env.timeout(seconds)

    env.process(work("begun before", False, 0.0))
    env.process(work("urgent", True, 0.5))
    env.process(work("waits", False, 0.6))
    env.process(work("urgent in turn", True, 1.0))
    env.process(work("urgent at last", True, 2.0))  # when nobody is, for no time
    env.run()
    assert ends == {
        "begun before": 1.0,
        "urgent": 1.5,
        "urgent in turn": 2.0,
        "urgent at last": 3.0,
        "waits": 4.0,
    }
