"""Verdicts over runs with and without planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.slo import judge, write_differences

Imagine = Callable[..., RunFolder]
LIMITS = Limits(
    each={"first_audio_p95": 0.5, "c100": 0.99, "rtf_p95": 1.0, "gap_p95": 1.0},
    all={"errors": 0.0},
    run={"memory_growth": 0.03, "shared_memory_growth": 0.03},
)


def test_a_run_without_fault_keeps_its_limits(imagine: Imagine) -> None:
    verdict = judge(imagine(), LIMITS)
    assert verdict.passed, verdict.reason
    assert len(verdict.rows) == 4 * 2 + 1 + 2
    assert "2 could not be measured" in verdict.reason  # memory, in so short a run
    assert "the closest: c100 of" in verdict.reason


def test_what_is_measured_is_numpys_percentile(imagine: Imagine) -> None:
    folder = imagine()
    (row,) = (r for r in judge(folder, LIMITS).rows if r.measure == "first_audio_p95" and "long" in r.place)
    waits = [s.chunks[0].at - s.intended for s in folder.samples() if s.scenario == "long"]
    assert row.measured == pytest.approx(np.percentile(waits, 95))


@pytest.mark.parametrize("baseline", [False, True])
def test_a_slow_stage_is_named(baseline: bool, imagine: Imagine) -> None:
    """With a baseline also one that takes less than another, which always took long."""
    healthy = imagine("before") if baseline else None
    slow = {"flow": 0.05, "vocoder": 0.045 if baseline else 0.8}
    verdict = judge(imagine(wait=1.0, compute=slow), LIMITS, healthy)
    assert not verdict.passed
    assert "first_audio_p95" in verdict.reason
    assert "allowed at most 0.5 s" in verdict.reason
    assert "vocoder holds" in verdict.reason


def test_a_queue_is_told_from_work(imagine: Imagine) -> None:
    verdict = judge(imagine(wait=1.0, queue={"flow": 0.7}), LIMITS)
    assert "flow holds" in verdict.reason
    assert "queue 700 ms" in verdict.reason


def test_a_dropped_chunk_is_named(imagine: Imagine) -> None:
    def drop(number: int, sample: Sample) -> Sample:
        if number % 50:
            return sample
        return replace(sample, chunks=sample.chunks[:1], error="BadAnswerError", message="a chunk is missing")

    verdict = judge(imagine(change=drop), LIMITS)
    assert not verdict.passed
    assert verdict.reason.startswith("errors of steady")
    assert "BadAnswerError in long" in verdict.reason
    assert "a chunk is missing" in verdict.reason


def test_errors_of_time_name_the_stage_too(imagine: Imagine) -> None:
    def late(number: int, sample: Sample) -> Sample:
        return replace(sample, error="RequestTimeoutError") if number % 9 == 0 else sample

    reason = judge(imagine(change=late, compute={"vocoder": 2.0}), LIMITS).reason
    assert "RequestTimeoutError" in reason
    assert "vocoder holds" in reason


def test_a_mixed_voice_is_named(imagine: Imagine) -> None:
    limits = replace(LIMITS, run={"different_answers": 0})
    folder = imagine()
    write_differences(folder, [])
    assert judge(folder, limits).passed
    write_differences(folder, ["long, voice 'anna': a mixed voice: it got voice 'otto'"])
    reason = judge(folder, limits).reason
    assert reason.startswith("different_answers is 1, allowed at most 0: long, voice 'anna': a mixed voice")


def test_a_growing_process_is_named(imagine: Imagine) -> None:
    verdict = judge(imagine(seconds=400.0, rate=1.0, grows={"tts_stream": 20.0}), LIMITS)
    assert not verdict.passed
    assert verdict.reason.startswith("memory_growth")
    assert "tts_stream grew from" in verdict.reason
    assert judge(imagine("flat", seconds=400.0, rate=1.0), LIMITS).passed


def test_underruns_are_counted_as_too_few_without_them(imagine: Imagine) -> None:
    def pause(_: int, sample: Sample) -> Sample:
        first, *rest = sample.chunks
        return replace(sample, chunks=(first, *(replace(one, at=one.at + 0.3) for one in rest)))

    verdict = judge(imagine(change=pause), LIMITS)
    assert verdict.reason.startswith("c100 of")
    assert "allowed at least 0.99" in verdict.reason


def test_without_metrics_the_reason_says_so(imagine: Imagine) -> None:
    assert "nobody answers" in judge(imagine(wait=1.0, metrics=False), LIMITS).reason


def test_limits_of_an_unknown_scenario_or_stage_are_not_kept_silently(imagine: Imagine) -> None:
    unknown = {"scenario": {"choir": {"rtf_p95": 1.0}}, "stage": {"encore": {"errors": 1.0}}}
    verdict = judge(imagine(), replace(LIMITS, **unknown))  # type: ignore[arg-type]
    assert "4 could not be measured" in verdict.reason
    assert {"choir", "encore"} < {row.place for row in verdict.rows if row.met is None}


def test_no_requests_behind_the_warm_up(imagine: Imagine) -> None:
    with pytest.raises(LoadTestError, match="warm-up"):
        judge(imagine(warm_up=59.9), LIMITS)


def test_a_scenario_and_a_stage_may_have_limits_of_their_own(imagine: Imagine) -> None:
    late = replace(LIMITS, each={"first_audio_p95": 0.5})
    verdict = judge(imagine(wait=1.0), replace(late, scenario={"long": {"first_audio_p95": 2.0}}))
    assert [row.place.split(" ")[0] for row in verdict.rows if row.met is False] == ["short"]
    assert judge(imagine("other", wait=1.0), replace(late, stage={"steady": {"first_audio_p95": 2.0}})).passed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[all]\nspeed = 1", r"'speed' in \[all\]; allowed: .*first_audio_p95"),
        ("[every]\nerrors = 0", r"'every' in the file; allowed: all, each"),
        ("[run]\nerrors = 0", r"'errors' in \[run\]; allowed: different_answers"),
        ("[scenario.long]\nx = 0", r"'x' in \[scenario.long\]"),
        ("[all]\nerrors = '1%'", r"errors = '1%' in \[all\]; a number"),
        ("[promise]\nslow = 1", r"'slow' in \[promise\]; allowed: first_audio"),
        ("all = 3", r"it is a section, \[all\]"),
        ("[all", "these are no limits"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=complaint):
        Limits.read(path)


def test_missing_limits(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="nothing.toml"):
        Limits.read(tmp_path / "nothing.toml")


def test_the_default_limits_can_be_read() -> None:
    limits = Limits.read(Path(__file__).parents[2] / "loadtests" / "slo.toml")
    assert limits.all["errors"] == 0
    assert limits.promise.first_audio
