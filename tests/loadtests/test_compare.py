"""Two runs: what differs and what is noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cosytriton_loadtests.compare import changes, interval
from cosytriton_loadtests.run_folder import RunFolder

Imagine = Callable[..., RunFolder]


def test_the_same_server_twice_is_the_same(imagine: Imagine) -> None:
    found = changes(imagine("a", seed=1), imagine("b", seed=2))
    assert {change.word for change in found} == {"same"}
    assert {(change.figure, change.scenario) for change in found} >= {
        ("rtf", "long"),
        ("first_audio", "short"),
    }


def test_a_slower_one_is_worse_and_comes_first(imagine: Imagine) -> None:
    first, *_ = found = changes(imagine("a", seed=1), imagine("b", seed=2, wait=0.3))
    assert first.worse
    assert first.figure == "first_audio"
    assert first.low < first.now - first.before < first.high
    assert "worse: median first_audio of" in str(first)
    assert {c.word for c in changes(imagine("c", wait=0.3), imagine("d")) if c.figure == "first_audio"} == {
        "better"
    }
    assert len(found) == 4 * 2


def test_few_requests_say_nothing(imagine: Imagine) -> None:
    assert changes(imagine("a", rate=0.1), imagine("b", rate=0.1, wait=9.0)) == []


def test_the_interval_holds_the_true_difference_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(3)
    pairs = [interval(rng.normal(1.0, 0.3, 60), rng.normal(1.2, 0.3, 60)) for _ in range(200)]
    assert np.mean([low <= 0.2 <= high for low, high in pairs]) == pytest.approx(0.95, abs=0.04)
