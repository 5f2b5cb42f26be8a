"""One server against sums by hand and the formulas of queues."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import simpy

from cosytriton_loadtests.planner.cores import Process
from cosytriton_loadtests.planner.replica import Replica, Speech, Visit
from cosytriton_loadtests.planner.simulation import simulate
from cosytriton_loadtests.planner.stage_times import PAST, Cost, StageTimes
from cosytriton_loadtests.playback import worst_underrun
from cosytriton_loadtests.samples import Sample

COUNT = 5_000
RATE = 0.6  # a second


def visits_of(times: StageTimes, *arrivals: tuple[float, Speech]) -> list[Visit]:
    """What becomes of requests that arrive at given times."""
    env = simpy.Environment()
    replica = Replica(env, times)
    visits = [Visit(speech, at) for at, speech in arrivals]

    def arrive(visit: Visit) -> Process:
        yield env.timeout(visit.came)
        yield from replica.speak(visit)

    for visit in visits:
        env.process(arrive(visit))
    env.run()
    assert replica.visits == 0
    return visits


def stream(*pieces: int) -> Speech:
    return Speech("some", "grpc-stream", pieces)


def unary(*pieces: int) -> Speech:
    return Speech("some", "grpc", pieces)


def mean_wait(samples: tuple[Sample, ...], service: float) -> float:
    """Mean time in the queue."""
    return float(np.mean([sample.ended - sample.intended for sample in samples])) - service


def pollaczek_khinchine(rate: float, services: list[float]) -> float:
    """Mean wait of M/G/1."""
    load = rate * float(np.mean(services))
    return rate * float(np.mean(np.square(services))) / (2 * (1 - load))


def test_a_stage_that_takes_turns_is_the_queue_with_constant_service(free: StageTimes) -> None:
    """M/D/1."""
    times = replace(free, vocoder=Cost(1.0))
    samples = simulate(times, [unary(50)], RATE, requests=COUNT).samples
    assert mean_wait(samples, 1.0) == pytest.approx(pollaczek_khinchine(RATE, [1.0]), rel=0.06)


@pytest.mark.parametrize("kind", ["exponential", "two sizes"])
def test_a_language_model_with_one_slot_is_a_plain_queue(free: StageTimes, kind: str) -> None:
    """M/M/1, W = load / (rate of service - rate), and M/G/1."""
    rng = np.random.default_rng(1)
    drawn = (
        rng.exponential(1000, 4000) if kind == "exponential" else rng.choice([500, 3000], 4000, p=[0.8, 0.2])
    )
    tokens = [max(1, int(token)) for token in drawn]
    # The first token comes from the prompt, which costs as much as a step here.
    times = replace(free, slots=1, max_waiting=10**6, step=Cost(1e-5), prefill=Cost(1e-5))
    rate = RATE / (float(np.mean(tokens)) * 1e-5)
    samples = simulate(times, [unary(count) for count in tokens], rate, requests=COUNT).samples
    services = [sample.tokens * 1e-5 for sample in samples]
    wanted = pollaczek_khinchine(rate, services)
    if kind == "exponential":
        assert wanted == pytest.approx(0.6 / (1 - 0.6) * np.mean(services), rel=0.06)
    assert mean_wait(samples, float(np.mean(services))) == pytest.approx(wanted, rel=0.08)


def test_requests_in_the_server_obey_littles_law(small: StageTimes) -> None:
    env = simpy.Environment()
    replica, rng, rate = Replica(env, small), np.random.default_rng(5), 6.0
    visits, seen = [], []

    def arrive() -> Process:
        for pause in rng.exponential(1 / rate, 2000):
            yield env.timeout(pause)
            visits.append(visit := Visit(stream(60), env.now))
            env.process(replica.speak(visit))

    def look() -> Process:
        while True:
            yield env.timeout(0.173)
            seen.append(replica.visits)

    env.process(look())
    env.run(env.process(arrive()))
    inside = np.mean([visit.ended - visit.came for visit in visits if visit.ended < math.inf])
    assert np.mean(seen) == pytest.approx(rate * inside, rel=0.05)


def test_utilisation_is_rate_times_work(free: StageTimes) -> None:
    times = replace(free, cores=4, request=Cost(0.1), vocoder=Cost(0.2), chunk=Cost(0.1))
    simulated = simulate(times, [unary(50)], 2.0, requests=3000)
    assert simulated.utilisation == pytest.approx(2.0 * 0.4 / 4, rel=0.03)


def test_one_stream_alone_takes_what_its_stages_take(free: StageTimes) -> None:
    """75 prompt tokens fill three hops: chunks of 25 and 50 tokens, and the rest; 3 more of lookahead."""
    times = replace(
        free,
        request=Cost(0.01),
        prefill=Cost(0.0, 0.001),
        step=Cost(0.002),
        flow_stream=Cost(0.1, 0.01),
        vocoder=Cost(0.05, 0.001),
        chunk=Cost(0.005),
        latency=0.003,
    )
    (visit,) = visits_of(times, (1.0, stream(100)))
    seconds = [seconds for _, seconds in visit.chunks]
    assert seconds == [1.0, 2.0, 1.0]
    first = 0.01 + 100 * 0.001 + 27 * 0.002 + (0.1 + (25 + PAST * 75) * 0.01) + (0.05 + 0.025) + 0.005
    assert visit.chunks[0][0] - 1.0 - times.latency == pytest.approx(first, abs=0.02)
    # The language model waits for the first sound, behind a burst of 5 steps; the other tokens come before
    # the second one and beside it.
    second = (100 - 28 - 5) * 0.002 + (0.1 + (50 + PAST * 100) * 0.01) + (0.05 + 0.05)
    assert visit.chunks[1][0] - visit.chunks[0][0] == pytest.approx(second)


def test_a_unary_request_is_one_chunk_with_all_pieces(free: StageTimes) -> None:
    times = replace(free, step=Cost(0.01), flow=Cost(0.0, 0.001))
    (visit,) = visits_of(times, (0.0, unary(50, 25)))
    ((at, seconds),) = visit.chunks
    assert seconds == 3.0
    # The second piece's tokens go before the first one's sound: they are not enough for a first sound.
    least = 49 * 0.01 + (75 + 50) * 0.001 + 24 * 0.01 + (75 + 25) * 0.001
    assert at == pytest.approx(least, rel=0.1)
    assert at < least + 0.01


def test_rows_share_the_steps_of_the_language_model(free: StageTimes) -> None:
    """100 steps behind the prompt; one prompt is fed between two steps, so that rows join one by one."""
    times, crowd = replace(free, step=Cost(0.01)), [(0.0, unary(101))] * 8

    def ends(times: StageTimes, count: int) -> list[float]:
        return [visit.ended for visit in visits_of(times, *crowd[:count]) if not visit.refused]

    assert ends(times, 8) == pytest.approx([1 + 0.01 * row for row in range(8)])
    # Who waits for a row goes before an answer is spoken, until there are 28 tokens for a first sound.
    assert ends(replace(times, slots=1), 3) == pytest.approx([1.27, 2.27, 3])
    assert ends(replace(times, step=Cost(0.0, 0.01)), 2) == pytest.approx([1.99, 2.0])
    assert len(ends(replace(times, slots=2, max_waiting=1), 5)) == 3


def test_first_sounds_go_before_what_others_hear_later(free: StageTimes) -> None:
    times = replace(free, vocoder=Cost(1.0))
    one, two, late = visits_of(times, (0.0, stream(200)), (0.1, stream(200)), (2.5, stream(200)))
    # At 3 s the second chunk of one and that of two both wait; who came last has heard nothing yet.
    assert [round(at) for at, _ in one.chunks][:2] == [1, 3]
    assert round(late.chunks[0][0]) == 4
    assert round(two.chunks[1][0]) == 5


@pytest.mark.parametrize("other", [unary(2000), stream(2000)], ids=["whole", "stream"])
def test_a_first_sound_has_the_core_alone(free: StageTimes, other: Speech) -> None:
    """But for the burst of steps, or the chunk, that another one has begun before."""
    times = replace(free, step=Cost(0.01), flow_stream=Cost(0.2), vocoder=Cost(0.1))
    first = 27 * 0.01 + 0.2 + 0.1
    *_, late = visits_of(times, (0.0, other), (5.0, stream(60)))
    chunk = 0.2 + 0.1
    assert 5 + first <= late.chunks[0][0] <= 5 + first + chunk + 0.01


def test_a_server_slower_than_speech_lets_playback_run_dry(free: StageTimes) -> None:
    slow = replace(free, vocoder=Cost(0.0, 0.05))  # 1.25 s for a second of speech
    quick = replace(free, vocoder=Cost(0.0, 0.01))
    for times, wanted in ((slow, 1.5), (quick, 0.0)):
        (sample,) = simulate(times, [stream(100)], 1.0, requests=1).samples
        assert worst_underrun(sample) == pytest.approx(wanted)  # 50 tokens take 2.5 s, 25 sound for 1 s


@pytest.mark.parametrize("family", ["cosyvoice1", "cosyvoice3"])
def test_chunks_are_those_of_the_family(free: StageTimes, family: str) -> None:
    (visit,) = visits_of(replace(free, family=family, prompt_tokens=150), (0.0, stream(400)))
    seconds = [seconds for _, seconds in visit.chunks]
    assert seconds == {"cosyvoice1": [2, 2, 2, 2], "cosyvoice3": [1, 2, 4, 4, 4, 1]}[family]


def test_round_robin_makes_arrivals_of_a_replica_more_even(free: StageTimes) -> None:
    times = replace(free, vocoder=Cost(1.0))
    waits = [
        mean_wait(simulate(times, [unary(50)], RATE * n, replicas=n, requests=COUNT // 2).samples, 1.0)
        for n in (1, 8)
    ]
    assert waits[1] < waits[0] / 2  # Kingman: the wait falls with the variance of the intervals
