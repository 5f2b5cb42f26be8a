"""An autoscaler in a spike."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.autoscaling import Policy, Scaled, Surge, recommend, scale
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.stage_times import Cost, StageTimes

# Short speech on a slow server, so that minutes are simulated in a moment.
MIX = [Speech("some", "grpc-stream", (20,))]
SURGE = Surge(base=0.5, peak=4.0, begin=120, length=300, seconds=900)
POLICY = Policy("requests", 1.0, start=30, stabilization=120)


@pytest.fixture
def slow(free: StageTimes) -> StageTimes:
    return replace(free, flow=Cost(0.6))


@cache
def run(times: StageTimes, policy: Policy, surge: Surge = SURGE) -> Scaled:
    return scale(times, MIX, surge, policy, allowed=1.5)


@pytest.mark.parametrize(
    ("metric", "replicas", "wanted"),
    [
        (4.3, 4, 4),  # within the tolerance
        (4.5, 4, 5),
        (3.5, 4, 4),
        (2.1, 4, 3),
        (0.0, 4, 1),  # the minimum
        (30.0, 1, 5),  # four more at a time
        (30.0, 6, 10),  # the maximum
    ],
)
def test_the_recommendation_is_that_of_kubernetes(metric: float, replicas: int, wanted: int) -> None:
    assert Policy("requests", 1.0).wanted(metric, replicas) == wanted


def test_pods_follow_the_traffic_and_first_audio_recovers(slow: StageTimes) -> None:
    outcome = run(slow, POLICY)
    ready = {moment.at: moment.replicas for moment in outcome.timeline}
    waits = {moment.at: moment.first_audio_p95 or 0.0 for moment in outcome.timeline}
    assert ready[120.0] < 3 < 4 <= ready[270.0]
    assert ready[870.0] < 4
    assert waits[150.0] > 1.5 > waits[360.0]
    assert outcome.most <= 10


def test_without_a_spike_there_is_one_pod(slow: StageTimes) -> None:
    outcome = run(slow, replace(POLICY, target=8.0), Surge(0.2, 0.2, 60, 60, 600))
    assert outcome.most == 1
    assert outcome.pod_minutes == pytest.approx(10)
    assert outcome.late < 0.1


def test_what_makes_an_autoscaler_slow_costs_first_audio(slow: StageTimes) -> None:
    quick = run(slow, POLICY)
    assert run(slow, replace(POLICY, start=150)).late > quick.late
    assert run(slow, replace(POLICY, target=6.0)).late > quick.late
    assert run(slow, replace(POLICY, minimum=5)).late < quick.late


def test_stabilization_keeps_pods_longer(slow: StageTimes) -> None:
    assert run(slow, replace(POLICY, stabilization=300)).pod_minutes > run(slow, POLICY).pod_minutes


def test_slots_do_not_see_the_queue_behind_them(free: StageTimes) -> None:
    """At most `slots` of them are taken, however many requests wait."""
    times, short = replace(free, slots=2, step=Cost(0.03)), Surge(0.5, 4.0, 60, 180, 360)
    requests, slots = (run(times, Policy(kind, 2.0, start=30), short) for kind in ("requests", "slots"))
    assert slots.late > requests.late


def test_the_cheapest_good_policy_is_recommended(slow: StageTimes) -> None:
    base = run(slow, POLICY)
    cheap, dear = replace(base, late=0.2, pod_minutes=5), replace(base, late=0.01, pod_minutes=90)
    good = replace(base, late=0.04, pod_minutes=50)
    assert recommend([cheap, dear, good]) is good
    assert recommend([cheap, replace(dear, late=0.1)]).late == 0.1
    with pytest.raises(LoadTestError, match="no policy"):
        recommend([])


def test_a_surge_has_its_rates() -> None:
    arrivals = np.array(Surge(1.0, 10.0, 100, 200, 1000).arrivals(np.random.default_rng(0)))
    counts = np.histogram(arrivals, [0, 100, 300, 1000])[0]
    assert counts == pytest.approx([100, 2000, 700], rel=0.2)
    assert (np.diff(arrivals) >= 0).all()


def test_a_policy_that_makes_no_sense_is_refused(slow: StageTimes) -> None:
    for policy in (replace(POLICY, minimum=0), replace(POLICY, target=0), replace(POLICY, minimum=11)):
        with pytest.raises(LoadTestError, match="positive numbers"):
            run(slow, policy)
    with pytest.raises(LoadTestError, match="outside"):
        run(slow, POLICY, replace(SURGE, length=1000))
