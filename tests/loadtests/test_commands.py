"""`cosytriton loadtest` as a user calls it: exit statuses, and what it says."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosytriton_ensemble.cli import main
from cosytriton_loadtests import commands
from cosytriton_loadtests.capacity import Bracket
from cosytriton_loadtests.planner.planning import PlanOptions
from cosytriton_loadtests.run import LoadOptions
from cosytriton_loadtests.run_folder import RunFolder

Imagine = Callable[..., RunFolder]


def limits(folder: Path, first_audio: float) -> Path:
    path = folder / "slo.toml"
    path.write_text(f"[all]\nfirst_audio_p95 = {first_audio}\n")
    return path


@pytest.mark.parametrize(("first_audio", "status"), [(1.0, 0), (0.1, 1)])
def test_judge(
    first_audio: float, status: int, imagine: Imagine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = imagine()
    caplog.set_level("INFO")
    path = limits(tmp_path, first_audio)
    assert main(["loadtest", "judge", str(folder.path), "--limits", str(path)]) == status
    assert folder.report_file.exists()
    *_, last = caplog.messages
    assert last.startswith("failed: first_audio_p95 of steady" if status else "passed: 1 limits are kept")


def test_what_cannot_be_judged_is_an_error(
    imagine: Imagine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadtest", "judge", str(tmp_path)]) == 2
    assert "no folder of a load test" in capsys.readouterr().err
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[all]\nspeed = 1")
    assert main(["loadtest", "judge", str(imagine().path), "--limits", str(wrong)]) == 2
    assert "'speed' in [all]; allowed: " in capsys.readouterr().err


def test_wrong_limits_are_said_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", "run", str(tmp_path / "run"), "--limits", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_compare(imagine: Imagine, caplog: pytest.LogCaptureFixture) -> None:
    before, now = (str(imagine(name, wait=wait).path) for name, wait in (("a", 0.2), ("b", 0.4)))
    caplog.set_level("INFO")
    assert main(["loadtest", "compare", before, now]) == 1
    assert caplog.messages[-1] == "8 of 8 medians became worse beyond the noise"
    assert main(["loadtest", "compare", now, before]) == 0


class Called:
    """Stands for a function: keeps what it is called with, gives what it shall."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.args, self.options = args, options
        return self._answer


def test_capacity(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    found = Called(SimpleNamespace(rate=3.14159, missed=3.5))
    monkeypatch.setattr("cosytriton_loadtests.capacity.find_capacity", found)
    caplog.set_level("INFO")
    command = ["loadtest", "capacity", str(tmp_path), "--users", "3", "--start", "2", "--seconds", "7"]
    assert main(command) == 0
    base, limits, folder, options = found.args
    assert (base.users, base.loop, folder, options.bracket.start, options.seconds) == (
        3,
        "closed",
        tmp_path,
        2,
        7,
    )
    assert limits.all["errors"] == 0
    assert caplog.messages[-1] == "the server keeps its limits at 3.14 requests/s, and misses them at 3.5"


def test_plan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    made = Called(SimpleNamespace(lines=lambda: ["two replicas"]))
    monkeypatch.setattr("cosytriton_loadtests.planner.planning.make_plan", made)
    caplog.set_level("INFO")
    command = ["loadtest", "plan", str(tmp_path), "--rate", "8", "--times", "t.json", "--speech", "2,5"]
    assert main(command) == 0
    options, folder = made.args
    assert (options.rate, options.times, options.speech, folder) == (8, Path("t.json"), (2, 5), tmp_path)
    assert caplog.messages == ["two replicas"]


@pytest.mark.parametrize(
    ("function", "local"), [("evaluate", []), ("evaluate_profiles", ["--repository", "r"])]
)
@pytest.mark.parametrize("status", [0, 1])
def test_shadow(
    function: str, local: list[str], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = SimpleNamespace(markdown=lambda: "# Verdict", reason="because", exit_code=status)
    evaluated = Called(verdict)
    monkeypatch.setattr(f"cosytriton_loadtests.shadow.{function}", evaluated)
    out = tmp_path / "new" / "shadow.md"
    assert main(["loadtest", "shadow", "a", "b", "--count", "5", "--out", str(out), *local]) == status
    assert 5 in evaluated.args
    assert evaluated.args[:2] == ((Path("r"), ("a", "b")) if local else ("a", "b"))
    assert out.read_text() == "# Verdict"


@pytest.mark.parametrize(
    ("options", "table", "left_out"),
    [
        (LoadOptions, commands.LOAD, set()),
        (PlanOptions, commands.PLAN, {"limits"}),
        (Bracket, commands.SEARCH, {"growth", "steps"}),
    ],
)
def test_options_are_those_of_the_dataclasses(
    options: type, table: dict[str, object], left_out: set[str]
) -> None:
    assert set(table) == {field.name for field in fields(options)} - left_out


def test_values_reach_the_options_and_others_keep_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    commands.LOADTEST.arguments(parser)
    args = parser.parse_args(["run", "--users", "3", "--warm-up", "2.5", "--workload", "mix.toml"])
    given = {"users": 3, "warm_up": 2.5, "workload": Path("mix.toml")}
    assert commands._given(args, commands.LOAD) == given


def test_the_command_line_is_light() -> None:
    code = "import sys, cosytriton_loadtests.commands; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "plotly", "locust", "gevent", "simpy", "grpc", "psutil"} & set(loaded.stdout.split())
