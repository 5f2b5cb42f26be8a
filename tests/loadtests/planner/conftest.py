"""Stage times that nobody measured, so that a test can say what must come out."""

from __future__ import annotations

import pytest

from cosytriton_loadtests.planner.stage_times import Cost, StageTimes

FREE = Cost()


@pytest.fixture
def free() -> StageTimes:
    """A server of one core whose stages cost nothing, for tests that give a cost to the one they look at."""
    return StageTimes("cosyvoice2", 1, FREE, FREE, FREE, FREE, FREE, FREE, prompt_tokens=75)


@pytest.fixture
def small() -> StageTimes:
    """A server about as quick as the demo voice on two cores."""
    return StageTimes(
        family="cosyvoice2",
        cores=2,
        request=Cost(0.005),
        prefill=Cost(0.0, 0.00003),
        step=Cost(0.0008, 0.0002),
        flow=Cost(0.005, 0.0004, 1.2),
        flow_stream=Cost(0.01, 0.0008, 1.2),
        vocoder=Cost(0.005, 0.0003, 1.2),
        chunk=Cost(0.003),
        prompt_tokens=82,
    )
