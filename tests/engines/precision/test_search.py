"""The search for layers that stay in higher precision, and its journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cosytriton_engines.errors import BuildError
from cosytriton_engines.precision.search import Figures, Journal, Outcome, search

LAYERS = [[f"layer{number}"] for number in range(20)]


def searched(needed: int, *, curve: bool = False, groups: Sequence[Sequence[str]] = LAYERS) -> Outcome:
    """A stage that loses 1 for each layer that is not kept, and may lose all but `needed`."""
    total = sum(len(group) for group in groups)

    def attempt(kept: Sequence[str]) -> Figures:
        return {"loss": total - len(kept)}

    return search("stage", lambda: groups, attempt, lambda figures: figures["loss"] <= total - needed, curve)


@pytest.mark.parametrize("needed", range(21))
def test_keeps_as_few_as_the_tolerance_allows(needed: int) -> None:
    found = searched(needed)
    assert found.kept == tuple(layer for (layer,) in LAYERS[:needed])
    assert found.figures == {"loss": 20 - needed}
    assert len(found.trials) <= 10, "a run of the stage for each: doubling and halving, not one by one"


def test_ranking_is_not_paid_for_where_nothing_need_be_kept() -> None:
    def ranked() -> Sequence[Sequence[str]]:
        raise AssertionError("asked")

    assert search("stage", ranked, lambda _: {"loss": 0}, lambda _: True).kept == ()


def test_layers_of_a_group_stay_together() -> None:
    assert searched(3, groups=[["a", "b"], ["c", "d"], ["e"]]).kept == ("a", "b", "c", "d")


def test_curve_goes_on_to_every_layer() -> None:
    trials = searched(1, curve=True).trials
    assert [trial.kept for trial in trials] == [0, 1, 2, 4, 8, 16, 20]
    assert [trial.passed for trial in trials] == [False, *[True] * 6]


def test_what_cannot_be_kept_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"stage does not keep its quality: with 20 layers .* it has loss 0"):
        searched(21)


@pytest.fixture
def steps() -> list[str]:
    return []


@pytest.fixture
def compute(steps: list[str]) -> Callable[[str], Callable[[], float]]:
    def step(name: str) -> Callable[[], float]:
        def run() -> float:
            steps.append(name)
            return 0.5

        return run

    return step


def test_a_stopped_search_goes_on_where_it_was(
    tmp_path: Path, steps: list[str], compute: Callable[[str], Callable[[], float]]
) -> None:
    identity = {"source": "a"}
    for _ in range(2):  # two runs of the program
        journal = Journal(tmp_path / "journal.json", identity)
        assert [journal.recall(name, compute(name)) for name in "ab"] == [0.5, 0.5]
    assert steps == ["a", "b"]


@pytest.mark.parametrize("damage", ["", "{", '{"identity": "other", "a": 1}', "[]"])
def test_a_journal_that_does_not_fit_is_begun_anew(
    damage: str, tmp_path: Path, steps: list[str], compute: Callable[[str], Callable[[], float]]
) -> None:
    (tmp_path / "journal.json").write_text(damage)
    assert Journal(tmp_path / "journal.json", {}).recall("a", compute("a")) == 0.5
    assert steps == ["a"]


def test_another_source_is_another_journal(
    tmp_path: Path, compute: Callable[[str], Callable[[], float]]
) -> None:
    path = tmp_path / "journal.json"
    Journal(path, {"source": "a"}).recall("a", compute("a"))
    assert Journal(path, {"source": "b"}).recall("a", lambda: 1) == 1
