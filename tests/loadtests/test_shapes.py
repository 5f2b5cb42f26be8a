from __future__ import annotations

import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.shapes import SHAPES, Planned, planned


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_take_the_whole_time_under_different_names(shape: str) -> None:
    stages = planned(shape, 8, 100)
    assert sum(stage.seconds for stage in stages) == pytest.approx(100)
    assert len({stage.name for stage in stages}) == len(stages)
    assert all(stage.users >= 1 for stage in stages)


def test_steps_rise_to_the_users() -> None:
    assert [stage.users for stage in planned("step", 8, 100)] == [2, 4, 6, 8]


def test_a_spike_rises_and_falls() -> None:
    assert planned("spike", 4, 100, peak=2.5) == (
        Planned("before", 40, 4),
        Planned("spike", 20, 10),
        Planned("after", 40, 4),
    )
    assert planned("spike", 1, 100, peak=1.1)[1].users == 2


@pytest.mark.parametrize(
    ("shape", "users", "seconds", "message"),
    [
        ("ramp", 8, 60, "'ramp'; known are constant, step, spike, soak"),
        ("step", 3, 60, "3 users for 60 s: the shape 'step' needs 4 or more users"),
        ("constant", 0, 60, "needs 1 or more users"),
        ("constant", 4, 0, "for 0 s"),
    ],
)
def test_what_cannot_be_done_is_said(shape: str, users: int, seconds: float, message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        planned(shape, users, seconds)
