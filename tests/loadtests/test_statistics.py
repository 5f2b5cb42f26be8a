"""Figures against counts by hand and a second way to take percentiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run_folder import RunInfo, Stage
from cosytriton_loadtests.samples import Chunk, Sample
from cosytriton_loadtests.statistics import ALL, Promise, Spread, failed, summarise, summary_of

START = 1000.0
STAGES = (Stage("calm", START, 50.0, 2, 2.0), Stage("busy", START + 50, 50.0, 4, 4.0))
INFO = RunInfo("here", "", "open", 10.0, STAGES)


def sample(due: float, wait: float = 0.2, *, gap: float = 0.4, sent: float | None = None) -> Sample:
    """Two chunks of half a second."""
    chunks = tuple(Chunk(due + wait + gap * index, 0.5, 0.1) for index in range(2))
    when = due if sent is None else sent
    stage = "calm" if due < START + 50 else "busy"
    return Sample("en", stage, "grpc-stream", {}, due, when, chunks[-1].at, chunks, 25, "ab")


def by_rank(values: list[float], share: float) -> float:
    """A percentile by linear interpolation between the two ranks around it."""
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def test_percentiles() -> None:
    values = list(np.random.default_rng(0).lognormal(size=537))
    spread = Spread.of(values)
    assert spread is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        assert getattr(spread, name) == pytest.approx(by_rank(values, share))
    assert spread.count == 537
    assert Spread.of([]) is None


def test_one_request_by_hand() -> None:
    """Due at 0, sent 0.1 s late; chunks at 0.2 and 0.9: the second comes 0.2 s after the first was played."""
    one = summary_of([sample(START, gap=0.7, sent=START + 0.1)], START, START + 10)
    assert one.value("first_audio_p50") == pytest.approx(0.2)
    assert one.value("first_audible_p50") == pytest.approx(0.3)
    assert one.value("whole_max") == pytest.approx(0.9)
    assert one.value("rtf_p50") == pytest.approx(0.8)  # from sending; one second of audio
    assert one.value("gap_p95") == pytest.approx(0.7)
    assert one.value("worst_underrun_max") == pytest.approx(0.2)
    assert one.c100 == 0
    assert one.goodput == 0
    assert one.audio_rate == pytest.approx(0.1)
    assert one.answers_rate == pytest.approx(0.1)


def test_each_request_is_of_one_kind() -> None:
    good = sample(START)
    bad = replace(good, request={"bad": "speed"})
    samples = [
        good,
        replace(good, cancelled=True, chunks=good.chunks[:1]),
        replace(bad, error="InvalidInputError", chunks=()),
        replace(bad, error="BadInputAccepted"),
        replace(good, error="InvalidInputError", chunks=()),
        replace(good, error="BadAnswerError", chunks=good.chunks[:1]),
        replace(good, error="BadAnswerError", chunks=()),
    ]
    one = summary_of(samples, START, START + 10)
    assert (one.requests, one.heard, one.left, one.refused, one.failed) == (7, 1, 1, 1, 4)
    assert one.error_kinds == {"BadAnswerError": 2, "BadInputAccepted": 1, "InvalidInputError": 1}
    assert one.errors == pytest.approx(4 / 7)
    assert [failed(s) for s in samples] == [False, False, False, True, True, True, True]
    assert one.goodput == pytest.approx(0.1)
    assert one.whole is not None
    assert one.whole.count == 1  # of answers that were heard to their end


def test_the_warm_up_is_cut_and_stages_are_told_apart() -> None:
    calm = [sample(START + at, 0.2) for at in range(50)]
    busy = [sample(START + 50 + at / 2, 0.6) for at in range(100)]
    whole, first, second, *rest = summarise([*calm, *busy], INFO)
    assert (whole.requests, first.requests, second.requests) == (140, 40, 100)
    assert (first.seconds, second.seconds, whole.seconds) == (40, 50, 90)
    assert first.value("first_audio_p99") == pytest.approx(0.2)
    assert second.value("first_audio_p50") == pytest.approx(0.6)
    assert [row.place for row in rest] == ["en / calm / grpc-stream", "en / busy / grpc-stream"]
    assert (whole.place, first.place) == (ALL, "calm")
    assert first.audio_rate == pytest.approx(1.0)  # one second of audio in each


def test_what_comes_after_a_stage_is_no_throughput_of_it() -> None:
    """An overloaded server: requests come at 2/s, answers 30 s later."""
    late = [sample(START + at / 2, 30.0) for at in range(100)]
    calm = summarise(late, INFO)[1]
    assert calm.requests == 80
    assert calm.answers_rate == pytest.approx(39 / 40, abs=0.06)  # of those due in 1000 to 1020
    assert calm.value("first_audio_p50") == pytest.approx(30)


def test_goodput_counts_what_was_promised() -> None:
    samples = [sample(START + 10 + at, 0.1 * at) for at in range(10)]
    calm = summarise(samples, INFO, Promise(first_audio=0.45))[1]
    assert calm.goodput == pytest.approx(5 / 40)
    assert summarise(samples, INFO, Promise(whole=0.0))[1].goodput == 0


def test_scenarios_and_protocols_are_told_apart() -> None:
    other = replace(sample(START + 20, 0.9), scenario="zh", protocol="http")
    rows = {row.place: row for row in summarise([sample(START + 20), other], INFO)}
    assert rows["en / calm / grpc-stream"].value("first_audio_max") == pytest.approx(0.2)
    assert rows["zh / calm / http"].value("first_audio_max") == pytest.approx(0.9)


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(LoadTestError, match="none of 1 requests was intended behind the warm-up"):
        summarise([sample(START + 5)], INFO)
    with pytest.raises(LoadTestError, match="none of 0 requests"):
        summarise([], INFO)
    with pytest.raises(LoadTestError, match="a warm-up of 200 s takes all of the run"):
        summarise([sample(START)], replace(INFO, warm_up=200.0))


def test_an_unknown_measure_is_said() -> None:
    with pytest.raises(
        LoadTestError, match="no measure 'first_audio_p42'; there are requests, .* first_audio"
    ):
        summary_of([sample(START)], START, START + 1).value("first_audio_p42")
