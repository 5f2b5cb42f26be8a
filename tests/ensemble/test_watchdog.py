"""Speech that hangs is noticed in time, and speech that does not is left alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, cycle, islice

import numpy as np
import pytest

from cosytriton_ensemble.families import FAMILIES
from cosytriton_ensemble.watchdog import MAX_PERIOD, MAX_SILENT_RUN, SilenceFilter, Watchdog

RATES = sorted({family.token_rate for family in FAMILIES.values()})
SILENT = frozenset({1, 2, 28})
OTHERS = range(100, 100 + MAX_PERIOD + 1)


def noticed(tokens: Iterable[int], rate: int = 25, silent: Iterable[int] = SILENT) -> tuple[int, str] | None:
    """How many tokens were heard when the watchdog barked, and what it said."""
    watchdog = Watchdog(rate, frozenset(silent))
    for count, token in enumerate(tokens, 1):
        if reason := watchdog.observe(token):
            return count, reason
    return None


def speech(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(200, 6561, count)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("period", range(1, MAX_PERIOD + 1))
def test_a_cycle_is_noticed_after_four_seconds(period: int, rate: int) -> None:
    tokens = [*speech(37), *islice(cycle(OTHERS[:period]), 20 * rate)]
    assert noticed(tokens, rate) == (37 + 4 * rate, "repetition")


def test_a_longer_cycle_is_none() -> None:
    assert noticed(islice(cycle(OTHERS), 2000)) is None


@pytest.mark.parametrize("period", [1, 3, MAX_PERIOD])
def test_a_cycle_that_breaks_begins_anew(period: int) -> None:
    almost = list(islice(cycle(OTHERS[:period]), 99))
    assert noticed([*almost, 7] * 5) is None
    assert noticed([*almost, 7, *islice(cycle(OTHERS[:period]), 100)]) == (200, "repetition")


def test_three_periods_are_needed_where_four_seconds_are_shorter() -> None:
    tokens = list(islice(cycle(OTHERS[:10]), 100))
    assert noticed(tokens, rate=1) == (30, "repetition")


@pytest.mark.parametrize("rate", RATES)
def test_silence_is_noticed_after_four_seconds(rate: int) -> None:
    silence = np.random.default_rng(0).choice(sorted(SILENT), 20 * rate).tolist()
    assert noticed([*speech(11), *silence], rate) == (11 + 4 * rate, "silence")
    assert noticed([*silence[: 4 * rate - 1], 300] * 3, rate) is None
    assert noticed(silence, rate, silent=()) is None  # no such tokens are known of this family


def test_one_silent_token_on_end_is_silence() -> None:
    assert noticed([28] * 200) == (100, "silence")


def test_other_speech_is_left_alone() -> None:
    for seed in range(5):
        assert noticed(speech(1500, seed)) is None
    # A few tokens in ever new orders, as in held vowels and pauses.
    assert noticed(np.random.default_rng(0).choice([5, 6, 28], 1500).tolist()) is None


def test_pauses_are_shortened() -> None:
    silence_filter = SilenceFilter(SILENT)
    pauses = ([1, 2] * 20, [28] * MAX_SILENT_RUN, [2] * (MAX_SILENT_RUN + 1))
    tokens = list(chain.from_iterable([300 + index, *pause] for index, pause in enumerate(pauses)))
    passed = [token for token in tokens if silence_filter.passes(token)]
    assert passed == [300, 1, 2, 1, 2, 1, 301, *[28] * 5, 302, *[2] * 5]


def test_no_silent_tokens_pass_everything() -> None:
    silence_filter = SilenceFilter(())
    assert all(silence_filter.passes(1) for _ in range(100))
