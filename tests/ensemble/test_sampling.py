"""Repetition-aware sampling against the official implementation's draws."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cosytriton_ensemble.sampling import RepetitionAwareSampler, SamplingError, seeded_uniform

CASES = 16
VOCABULARY = 6564  # of CosyVoice 2
SECONDS_PER_TOKEN = 1e-3  # the sampler must vanish beside a step of the language model

SAMPLER = RepetitionAwareSampler()

Draw = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def draws(golden: Callable[[str], Draw]) -> list[Draw]:
    """The inputs and results of the official sampler's draws."""
    tensors = golden("ras")
    names = [f"ras{case:02}." for case in range(CASES)]
    return [{k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)} for name in names]


@pytest.mark.parametrize("case", range(CASES))
def test_official_draws(case: int, draws: list[Draw]) -> None:
    golden = draws[case]
    logits = golden["logp_in"]
    untouched = logits.copy()
    recorded = iter(golden["u"].tolist())

    token = SAMPLER.sample(logits, golden["history"].tolist(), recorded.__next__)

    assert token == golden["token"]
    assert len(golden["u"]) - len(list(recorded)) == golden["draws_used"]
    np.testing.assert_array_equal(logits, untouched)


@pytest.mark.parametrize("case", range(CASES))
def test_official_nucleus(case: int, draws: list[Draw]) -> None:
    nucleus = SAMPLER.nucleus(np.exp(draws[case]["logp_in"]))
    assert len(nucleus) == draws[case]["nucleus_size"]


def test_the_nucleus_is_that_of_a_full_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        # Few distinct values: ties stand everywhere, across the threshold too.
        logits = rng.integers(0, 4, 60).astype(np.float32)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        expected: list[int] = []
        mass = 0.0
        for token in np.argsort(-probabilities, kind="stable"):
            if mass >= SAMPLER.top_p or len(expected) == SAMPLER.top_k:
                break
            expected.append(int(token))
            mass += probabilities[token]
        assert SAMPLER.nucleus(probabilities).tolist() == expected


def test_the_draw_follows_the_probabilities() -> None:
    logits = np.log(np.array([0.05, 0.35, 0.1, 0.5], np.float32))
    uniform = seeded_uniform(1)
    draws = [SAMPLER.sample(logits, [], uniform) for _ in range(4000)]
    # The nucleus is {3, 1}: together they cross the mass of 0.8.
    np.testing.assert_allclose(np.bincount(draws) / len(draws), [0, 0.35 / 0.85, 0, 0.5 / 0.85], atol=0.03)


def test_a_repetition_is_drawn_again_from_the_whole_vocabulary() -> None:
    logits = np.full(100, -5.0, np.float32)
    logits[7] = 10.0  # alone in the nucleus
    assert SAMPLER.sample(logits, [], lambda: 0.5) == 7
    assert SAMPLER.sample(logits, [7], lambda: 0.999) == 99  # far outside the nucleus, but never 7
    assert SAMPLER.sample(logits, [7, *range(20, 30)], lambda: 0.999) == 7  # 11 tokens ago: forgotten


def test_a_repetition_whose_rivals_have_no_mass_in_float32() -> None:
    logits = np.array([0.0, 500.0, 1.0], np.float32)
    assert SAMPLER.sample(logits, [1], lambda: 0.9) == 2


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, 9.0, -np.inf], np.float32)
    assert SAMPLER.sample(logits, [2], lambda: 0.0) == 1  # the least uniform number there is
    assert SAMPLER.sample(logits, [2], lambda: 1 - 2**-53) == 1  # and the largest


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[3] = bad
    with pytest.raises(SamplingError, match=str(bad)):
        SAMPLER.sample(logits, [], lambda: 0.5)


def test_nothing_left_to_draw_is_an_error() -> None:
    logits = np.array([0.0, -np.inf], np.float32)
    with pytest.raises(SamplingError):
        SAMPLER.sample(logits, [0], lambda: 0.5)


def test_seeds() -> None:
    def numbers(seed: int) -> list[float]:
        uniform = seeded_uniform(seed)
        return [uniform() for _ in range(3)]

    assert numbers(5) == numbers(5) != numbers(6)
    assert numbers(-(2**63)) != numbers(2**63 - 1)  # all of INT64 is allowed


def test_a_token_of_a_full_vocabulary_costs_little() -> None:
    logits = np.random.default_rng(0).normal(0, 3, VOCABULARY).astype(np.float32)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        SAMPLER.sample(logits, [int(logits.argmax())], lambda: 0.0)  # the first draw repeats: both are paid
        times.append(time.perf_counter() - start)
    assert min(times) < SECONDS_PER_TOKEN
