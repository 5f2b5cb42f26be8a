"""Shadow evaluation: verdicts over imagined answers, and two profiles of the demo voice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Voice
from cosytriton_ensemble.errors import ServerError
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.judges import Judges, edits, words
from cosytriton_loadtests.shadow import evaluate, evaluate_profiles, inputs
from cosytriton_loadtests.shadow_verdict import Answer, Case, ShadowLimits, ShadowVerdict, figure, judge
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD, Ask
from cosytriton_loadtests.workload_file import read_workload

RATE = 24_000
NAMES = ("present", "candidate")


def spoken(pitch: float, seed: int, tokens: int = 25) -> Answer:
    """A sound of one pitch whose loudness and length change with the seed, as sampling changes speech."""
    rng = np.random.default_rng(seed)
    time = np.arange(tokens * 960) / RATE
    envelope = np.interp(time, np.linspace(0, time[-1], 12), rng.uniform(0.2, 1, 12))
    sound = envelope * sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 12)) / 4
    return Answer((sound + rng.normal(0, 1e-3, time.size)).astype(np.float32), RATE, tokens, 0.3, 0.5)


def cases(candidate: Any, count: int = 9) -> list[Case]:
    """`candidate(number)` answers input `number`."""
    asks = [
        Ask("a", "grpc-stream", f"text {number}", "v", options={"seed": number}) for number in range(count)
    ]
    return [Case(ask, spoken(120, n), spoken(120, 100 + n, 24), candidate(n)) for n, ask in enumerate(asks)]


def verdict(candidate: Any, **limits: Any) -> ShadowVerdict:
    return judge(NAMES, cases(candidate), ShadowLimits(**limits))


def test_a_candidate_that_says_the_same_is_promoted() -> None:
    same = verdict(lambda n: spoken(120, n))
    assert same.promote
    assert same.exit_code == 0
    assert "# Promote candidate" in same.markdown()
    figures = {one.name: one for one in same.figures}
    assert figures["log-mel distance, dB"].value == pytest.approx(0, abs=1e-3)
    assert figures["duration ratio"].value == 1
    assert figures["equal token counts, share"].value == 1
    assert figures["equal token counts to another seed, share"].value == 0


def test_other_draws_of_the_same_voice_are_no_fault() -> None:
    assert verdict(lambda n: spoken(120, 200 + n, 26)).promote


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda n: spoken(310, n), "log-mel distance"),
        (lambda n: spoken(120, n, 40), "duration ratio"),
        (lambda n: replace(spoken(120, n), first_audio=0.6), "first audio"),
        (lambda n: replace(spoken(120, n), whole=0.9), "time for a second of speech"),
        (
            lambda n: Answer(np.zeros(0, np.float32), error="Boom") if n == 4 else spoken(120, n),
            "failed inputs",
        ),
    ],
)
def test_each_fault_is_refused_by_its_name(fault: Any, named: str) -> None:
    refused = verdict(fault)
    assert not refused.promote
    assert refused.exit_code == 1
    assert named in refused.reason
    assert [one.name for one in refused.figures if not one.kept and named in one.name]
    assert "# Do not promote candidate" in refused.markdown()
    assert ("'text 4': Boom" in refused.markdown()) == (named == "failed inputs")


def test_a_longer_median_within_the_noise_of_the_draws_is_no_fault() -> None:
    lengths = (15, 22, 30, 33, 18, 31, 24, 35, 32)  # 25 tokens of the present server; median 1.2 of them
    ratio = next(
        one for one in verdict(lambda n: spoken(120, n, lengths[n])).figures if one.name == "duration ratio"
    )
    assert ratio.value == 1.2
    assert ratio.low < 1
    assert ratio.kept


def test_a_limit_decides() -> None:
    slow = [replace(spoken(120, n), first_audio=0.6) for n in range(9)]
    assert not verdict(slow.__getitem__).promote
    assert verdict(slow.__getitem__, latency=2.5).promote


def test_without_an_answer_of_the_present_server_there_is_no_verdict() -> None:
    dead = [
        replace(case, present=replace(case.present, error="gone")) for case in cases(lambda n: spoken(1, n))
    ]
    with pytest.raises(LoadTestError, match=r"present answers none of 9 inputs \(gone\)"):
        judge(NAMES, dead, ShadowLimits())


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Medians of samples whose true median is 0: 95 % of the intervals hold it, within sampling error."""
    rng = np.random.default_rng(3)
    figures = [figure("x", rng.normal(0, 1, 25)) for _ in range(200)]
    assert 0.89 < np.mean([one.low <= 0 <= one.high for one in figures]) <= 1


def test_inputs_repeat_by_their_seed_and_are_all_to_be_spoken() -> None:
    workload = read_workload(DEFAULT_WORKLOAD).with_shares(0.5, 0.5)
    asked = inputs(workload, 40, 7)
    assert asked == inputs(workload, 40, 7) != inputs(workload, 40, 8)
    assert not any(ask.bad or ask.cancel_after for ask in asked)
    with pytest.raises(LoadTestError, match="count = 0"):
        inputs(workload, 0)


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3)],
)
def test_edits_are_those_of_levenshtein(one: str, other: str, count: int) -> None:
    assert edits(one, other) == edits(other, one) == count


def test_words_are_counted_as_they_are_spoken() -> None:
    assert words("Number 02, it's red.") == ["number", "zero", "two", "it's", "red"]


def test_a_profile_that_is_not_there_says_so(tmp_path: Path) -> None:
    workload = read_workload(DEFAULT_WORKLOAD)
    with pytest.raises(ServerError, match=r"did not become ready; the end of .*cpu\.log"):
        evaluate_profiles(tmp_path, ("cpu", "cpu_int8"), workload, tmp_path / "logs", 1)


@pytest.mark.loadtest
def test_a_server_is_promoted_beside_itself(server: Any) -> None:
    workload = read_workload(DEFAULT_WORKLOAD)
    same = evaluate(server.grpc_url, server.grpc_url, workload, 4, limits=ShadowLimits(latency=5))
    assert same.promote, same.markdown()
    figures = {one.name: one for one in same.figures}
    assert figures["equal token counts, share"].value == 1
    assert figures["equal token ids, share"].value == 1
    assert figures["equal token ids to another seed, share"].value < 1
    assert figures["log-mel distance, dB"].value < 1e-2


@pytest.mark.loadtest
def test_int8_beside_fp32_gets_a_verdict(int8_repository: Path, tmp_path: Path) -> None:
    workload = read_workload(DEFAULT_WORKLOAD)
    said = evaluate_profiles(int8_repository, ("cpu", "cpu_int8"), workload, tmp_path, 6)
    print(said.markdown())
    assert said.promote == (not [one for one in said.figures if not one.kept])
    figures = {one.name: one for one in said.figures}
    assert figures["failed inputs"].value == 0
    assert figures["log-mel distance, dB"].value > 0.1  # another precision does say something else
    assert figures["log-mel distance over that to another seed"].kept
    assert 0.5 < figures["duration ratio"].value < 2


@pytest.mark.listen
def test_the_judges_know_words_and_voices(demo_checkpoint: Any) -> None:
    prompts = demo_checkpoint.path / "prompts"
    slt, also_slt, rms = (Voice.from_wav(prompts / f"{name}.wav") for name in ("slt_1", "slt_3", "rms_2"))
    said, judges = (prompts / "slt_1.txt").read_text(), Judges()
    assert judges.word_errors(slt.audio, slt.sample_rate, said) < 0.3
    assert judges.word_errors(slt.audio, slt.sample_rate, "Good night, my dear children.") > 0.7

    def alike(other: Voice) -> float:
        return judges.similarity(slt.audio, other.audio, (slt.sample_rate, other.sample_rate))

    assert alike(also_slt) > alike(rms) + 0.1
