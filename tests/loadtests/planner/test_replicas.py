"""How many replicas a rate takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.replicas import capacity, look_out, plan
from cosytriton_loadtests.planner.stage_times import Cost, StageTimes

MIX = [Speech("some", "grpc-stream", (60,))]
LIMITS = Limits(all={"first_audio_p95": 0.4, "c100": 0.95, "errors": 0.0})


def test_the_least_number_that_keeps_the_limits(small: StageTimes) -> None:
    found = plan(small, 40.0, MIX, LIMITS, requests=300)
    assert [outlook.replicas for outlook in found.outlooks] == list(range(1, found.replicas + 1))
    assert [outlook.passed for outlook in found.outlooks] == [False] * (found.replicas - 1) + [True]
    waits = [outlook.first_audio_p95 for outlook in found.outlooks]
    assert waits[-1] <= 0.4
    # By the law of utilisation, fewer than the work needs cannot do.
    last = found.outlooks[-1]
    work = last.utilisation * small.cores * last.replicas / 40.0
    assert 40.0 * work / small.cores < found.replicas < 2.5 * 40.0 * work / small.cores


def test_replicas_carry_at_least_as_many_times_what_one_carries(small: StageTimes) -> None:
    one = capacity(small, MIX, LIMITS, start=6, requests=300)
    assert look_out(small, 0.9 * one, MIX, LIMITS, requests=300).passed
    assert not look_out(small, 1.15 * one, MIX, LIMITS, requests=300).passed
    assert plan(small, 2.8 * one, MIX, LIMITS, requests=300).replicas == 3


def test_capacity_of_one_queue_is_where_its_wait_meets_the_limit(free: StageTimes) -> None:
    """M/D/1 of 0.1 s: a mean of 0.25 s is exceeded from a load of 3/4 on."""
    times = replace(free, vocoder=Cost(0.1))
    mix, limits = [Speech("some", "grpc", (50,))], Limits(all={"first_audio_mean": 0.25})
    found = capacity(times, mix, limits, start=6, requests=1000)
    assert found == pytest.approx(7.5, rel=0.08)


def test_underruns_count(small: StageTimes) -> None:
    slow = replace(small, flow_stream=Cost(0.0, 0.1), cores=1)  # 2.5 times as long as it sounds
    outlook = look_out(slow, 0.01, [Speech("some", "grpc-stream", (200,))], LIMITS, requests=50)
    assert outlook.c100 == 0
    assert outlook.worst_underrun > 1
    assert not outlook.passed


def test_limits_that_one_request_alone_misses_are_an_error(small: StageTimes) -> None:
    with pytest.raises(LoadTestError, match="no number of replicas helps"):
        plan(small, 1.0, MIX, Limits(all={"first_audio_p95": 0.001}), most=3, requests=50)
    with pytest.raises(LoadTestError, match="give more than none"):
        plan(small, 0.0, MIX, LIMITS)
    with pytest.raises(LoadTestError, match="give more than none"):
        plan(small, 1.0, [], LIMITS)
