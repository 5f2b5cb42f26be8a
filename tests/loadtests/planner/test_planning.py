"""The whole plan, as the command asks for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cosytriton_ensemble.cli import main
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.planner.planning import PlanOptions, make_plan
from cosytriton_loadtests.planner.stage_times import Cost, StageTimes

LIMITS = Limits(all={"first_audio_p95": 20.0})


def test_a_plan_is_written_and_told(free: StageTimes, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    slow = replace(free, flow=Cost(8.0))
    slow.write(times)
    options = PlanOptions(0.12, LIMITS, times=times, speech=(0.8,), surge=2.0, start=30.0)
    planning = make_plan(options, tmp_path / "plan")
    assert planning.capacity * (planning.plan.replicas - 1) < 0.12
    assert planning.recommended in planning.scaled
    text = "\n".join(planning.lines())
    assert f"one replica carries {planning.capacity:.3g} requests/s; {planning.active:.1f} are active" in text
    assert text.count("pod-minutes") == len(planning.scaled) > 3
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written["capacity"] == planning.capacity
    assert StageTimes.read(tmp_path / "plan" / "stage_times.json") == slow


def test_what_is_missing_is_said(small: StageTimes, tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="nothing was measured"):
        make_plan(PlanOptions(1.0, LIMITS), tmp_path)
    small.write(tmp_path / "times.json")
    with pytest.raises(LoadTestError, match="the mix is unknown"):
        make_plan(PlanOptions(1.0, LIMITS, times=tmp_path / "times.json"), tmp_path)


def test_the_command_plans(free: StageTimes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    replace(free, flow=Cost(0.5)).write(tmp_path / "times.json")
    (tmp_path / "slo.toml").write_text("[all]\nfirst_audio_p95 = 2.5\n")
    given = ["--times", str(tmp_path / "times.json"), "--limits", str(tmp_path / "slo.toml")]
    assert main(["loadtest", "plan", str(tmp_path / "plan"), "--rate=1", "--speech=0.8", *given]) == 0
    assert "one replica carries" in caplog.text
    assert main(["loadtest", "plan", str(tmp_path / "plan"), "--rate=1", "--load", str(tmp_path)]) == 2
