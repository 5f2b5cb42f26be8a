"""The canary's script; its kubectl writes down what it is asked, and the real one applies the patches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "k8s" / "rollout" / "canary.py"
ROUTE, CANARY = "demo-cosytriton", "next-cosytriton"
KUBECTL = """#!/bin/sh
echo "kubectl $*" >> "{folder}/calls"
test ! -e "{folder}/no-cluster" || exit 1
for last in "$@"; do :; done
case "$*" in
*" get "*) cat "{folder}/route.json" ;;
*" patch "*)
    "{kubectl}" patch --local --filename "{folder}/route.json" --type=json "$last" --output json \\
        > "{folder}/patched" && mv "{folder}/patched" "{folder}/route.json" ;;
esac
"""
COSYTRITON = """#!/bin/sh
echo "cosytriton $*" >> "{folder}/calls"
case "$3" in *-percent) name=$(basename "$3") ;; *) name=$2 ;; esac
test ! -e "{folder}/$name.slow" || {{ touch "{folder}/$name.began"; sleep 30; }}
test ! -e "{folder}/$name.cut" || touch "{folder}/no-cluster"
exit "$(cat "{folder}/$name.status" 2>/dev/null || echo 0)"
"""

pytestmark = pytest.mark.chart


@dataclass(frozen=True)
class Stage:
    """A folder with the programs that the script calls, and the route that it changes."""

    folder: Path

    def start(self, action: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), action, "--namespace=speech", f"--route={ROUTE}"]
        command += [f"--canary={CANARY}"]
        if action == "promote":
            command += [
                "--stable-url=old:8001",
                "--canary-url=new:8001",
                f"--folder={self.folder / 'reports'}",
            ]
        path = os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        return subprocess.Popen([*command, *words], env=path, stderr=subprocess.PIPE, text=True)

    def run(self, action: str, *words: str) -> tuple[int, str]:
        """Exit status, and what was said."""
        process = self.start(action, *words)
        said = process.communicate(timeout=60)[1]
        return process.returncode, said

    def weights(self) -> dict[str, int]:
        """Percent of the requests by Service, as the route stands now."""
        route = json.loads((self.folder / "route.json").read_text())
        return {ref["name"]: ref["weight"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]}

    def history(self) -> list[str]:
        """What happened, in its order: a weight that was set, "shadow", or a load test."""
        found = []
        for line in (self.folder / "calls").read_text().splitlines():
            program, _, words = line.partition(" ")
            if program == "kubectl" and " patch " in line:
                patch = json.loads(line.partition("--patch=")[2])
                (weight,) = [patch[i + 1]["value"] for i in (0, 2) if patch[i]["value"] == CANARY]
                found.append(f"{weight} %")
            elif program == "cosytriton":
                found.append(words.removeprefix("loadtest "))
        return found

    def verdict(self, name: str, status: int) -> None:
        (self.folder / f"{name}.status").write_text(str(status))


@pytest.fixture
def stage(tmp_path: Path, kubectl: Path, render: Callable[..., Any]) -> Stage:
    route = render("gateway.enabled=true", "gateway.parent=public", f"gateway.canary.service={CANARY}")
    (tmp_path / "route.json").write_text(json.dumps(route.one("GRPCRoute")))
    for name, text in (("kubectl", KUBECTL), ("cosytriton", COSYTRITON)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, kubectl=kubectl))
        (tmp_path / name).chmod(0o755)
    return Stage(tmp_path)


def test_a_good_canary_gets_all_requests_step_by_step(stage: Stage) -> None:
    status, _ = stage.run("promote", "--", "--seconds=60", "--loop", "open")
    assert status == 0
    assert stage.weights() == {ROUTE: 0, CANARY: 100}
    runs = [
        f"run {stage.folder}/reports/{step}-percent --url new:8001 --seconds=60 --loop open"
        for step in (10, 50, 100)
    ]
    expected = ["0 %", "shadow old:8001 new:8001", "10 %", runs[0], "50 %", runs[1], "100 %", runs[2]]
    assert stage.history() == expected
    calls = [line for line in (stage.folder / "calls").read_text().splitlines() if line.startswith("kubectl")]
    assert all(line.startswith("kubectl --namespace=speech ") for line in calls)


def test_a_canary_that_speaks_otherwise_gets_no_request(stage: Stage) -> None:
    stage.verdict("shadow", 1)
    status, said = stage.run("promote")
    assert status == 1
    assert "does not speak as old:8001 does" in said
    assert stage.weights() == {ROUTE: 100, CANARY: 0}
    assert stage.history() == ["0 %", "shadow old:8001 new:8001", "0 %"]


@pytest.mark.parametrize(("missed", "status"), [("10-percent", 1), ("100-percent", 1), ("50-percent", 2)])
def test_a_canary_that_misses_its_limits_is_rolled_back(stage: Stage, missed: str, status: int) -> None:
    stage.verdict(missed, status)
    assert stage.run("promote")[0] == status
    assert stage.weights() == {ROUTE: 100, CANARY: 0}
    assert stage.history()[-1] == "0 %"
    assert missed in stage.history()[-2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_promotion_is_rolled_back(stage: Stage, number: signal.Signals) -> None:
    (stage.folder / "50-percent.slow").touch()
    process = stage.start("promote")
    deadline = time.monotonic() + 60
    while not (stage.folder / "50-percent.began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert stage.weights() == {ROUTE: 50, CANARY: 50}
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert stage.weights() == {ROUTE: 100, CANARY: 0}


def test_a_rollback_is_one_step(stage: Stage) -> None:
    stage.run("promote")
    (stage.folder / "calls").unlink()
    assert stage.run("rollback")[0] == 0
    assert stage.weights() == {ROUTE: 100, CANARY: 0}
    assert stage.history() == ["0 %"]


def test_a_route_without_the_canary_is_an_error_before_anything_is_tried(stage: Stage) -> None:
    file = stage.folder / "route.json"
    file.write_text(file.read_text().replace(CANARY, "somebody-else"))
    status, said = stage.run("promote")
    assert status == 2
    assert f"no backend {CANARY}" in said
    assert "gateway.canary.service" in said
    assert stage.history() == []


def test_a_cluster_that_is_gone_is_said(stage: Stage) -> None:
    stage.verdict("10-percent", 1)
    (stage.folder / "10-percent.cut").touch()
    status, said = stage.run("promote")
    assert status == 2
    assert f"{CANARY} may still have requests" in said
    assert stage.weights() == {ROUTE: 90, CANARY: 10}


@pytest.mark.parametrize("weights", ["0", "101", "ten"])
def test_weights_are_percent(stage: Stage, weights: str) -> None:
    status, said = stage.run("promote", "--weights", weights)
    assert status == 2
    assert "allowed are 1 to 100" in said


def test_the_patch_fails_where_the_route_was_changed(stage: Stage, kubectl: Path) -> None:
    """The real kubectl refuses it: an index may mean another Service by then."""
    stage.run("rollback")
    last = (stage.folder / "calls").read_text().splitlines()[-1]
    patch = last.partition("--patch=")[2]
    route = json.loads((stage.folder / "route.json").read_text())
    route["spec"]["rules"][0]["backendRefs"].reverse()
    (stage.folder / "changed.json").write_text(json.dumps(route))
    words = [
        "patch",
        "--local",
        "--filename",
        str(stage.folder / "changed.json"),
        "--type=json",
        "--patch",
        patch,
    ]
    done = subprocess.run([kubectl, *words, "--output=yaml"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "test" in done.stderr


def test_the_route_is_a_manifest_that_kubectl_takes(stage: Stage, check: Callable[..., None]) -> None:
    stage.run("promote", "--weights", "25")
    check(json.loads((stage.folder / "route.json").read_text()), "1.37")
    assert stage.weights() == {ROUTE: 75, CANARY: 25}
