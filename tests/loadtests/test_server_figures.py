"""What looks add up to."""

from __future__ import annotations

import pytest

from cosytriton_loadtests import server_figures as figures
from cosytriton_loadtests.server_watch import Look, Process

COUNT, EXECUTIONS = "nv_inference_count", "nv_inference_exec_count"
QUEUE, COMPUTE = "nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us"


def look(at: float, count: float, **gauges: float) -> Look:
    metrics = {COUNT: count, EXECUTIONS: count / 4, QUEUE: 2e6 * count, COMPUTE: 1e6 * count}
    others = {name: {"speech_lm": value} for name, value in gauges.items()}
    return Look(at, {name: {"flow": value} for name, value in metrics.items()} | others)


def test_load_of_a_model() -> None:
    load = figures.model_loads([look(0, 100), look(1, 104), look(2, 108)])["flow"]
    assert (load.requests, load.executions, load.queue, load.compute) == (8, 2, 16, 8)
    assert load.batch == 4
    assert load.each(load.queue) == 2


def test_a_server_that_began_anew_counts_from_zero() -> None:
    assert figures.counted([look(0, 100), look(1, 104), look(2, 3)], COUNT) == {"flow": 7}


def test_the_language_model_by_littles_law() -> None:
    """Four requests of 2.5 s each, two at a time, and one that waits all the while."""
    gauges = {"cosytriton_speech_lm_active": 2.0, "cosytriton_speech_lm_waiting": 1.0}
    looks = [look(at, 0, **gauges, cosytriton_speech_lm_ends_total=at * 4 / 5) for at in range(6)]
    load = figures.model_loads(looks)["speech_lm"]
    assert load.requests == 4
    assert load.each(load.compute) == pytest.approx(2.5)
    assert load.each(load.queue) == pytest.approx(5 / 4)


def test_series_over_time() -> None:
    looks = [look(0, 0), look(2, 8), look(3, 8), look(4, 12)]
    assert figures.rates(looks, COUNT) == {"flow": ([2, 3, 4], [4, 0, 4])}
    assert figures.rates(looks, QUEUE, COUNT) == {"flow": ([2, 4], [2, 2])}
    assert figures.gauges(looks, EXECUTIONS) == {"flow": ([0, 2, 3, 4], [0, 2, 2, 3])}


def test_only_a_window_with_the_look_before_it() -> None:
    looks = [look(at, at) for at in range(10)]
    assert [one.at for one in figures.between(looks, 4.5, 7)] == [4, 5, 6, 7]
    assert [one.at for one in figures.between(looks, 0)] == list(range(10))


def test_memory_of_requests_is_no_growth() -> None:
    def at(second: int) -> Look:
        busy = second % (2 if second < 50 else 5)  # more often at the end
        return Look(second, {}, (Process("tts_stream", 1, (100 + 200 * bool(busy)) << 20, 0),), 7)

    assert [one.share for one in figures.growth([at(second) for second in range(100)])] == [0, 0]


def test_growth_of_processes_of_one_name() -> None:
    def at(second: int) -> Look:
        stubs = (Process("tts", 1, 100 << 20, 0), Process("tts", 2, (100 + second) << 20, 0))
        return Look(second, {}, (*stubs, Process("quiet", 3, (50 << 20) + second * 1000, second * 0.5)), 7)

    looks = [at(second) for second in range(101)]
    worst, *rest = figures.growth(looks)
    assert worst.name == "tts"
    assert worst.share == pytest.approx(80.5 / 201.9, rel=0.02)  # the least of the first and the last fifth
    assert {one.name: one.share for one in rest} == {"quiet": 0, "/dev/shm": 0}
    assert figures.cpu(looks)["quiet"][1][:3] == [0.5, 0.5, 0.5]
