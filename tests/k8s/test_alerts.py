"""The chart's alerts, through Prometheus' own `promtool`: each fires when it should, and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s" / "cosytriton" / "files" / "alerts.yaml"
TESTS = Path(__file__).with_name("alerts.promtool.yaml")
GUIDE = ROOT / "k8s" / "README.md"
KINDS = (
    "FirstAudioSlow",
    "QueueLong",
    "SlotsFull",
    "Errors",
    "ModelDead",
    "Down",
    "Restarts",
    "CacheCold",
    "MemoryGrowth",
    "WatchdogStops",
)


def needs_promtool(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of `make chart`, which installs it."""
    reason = "promtool is not installed (Debian: apt-get install prometheus)"
    skipped: Callable[..., None] = pytest.mark.skipif(not shutil.which("promtool"), reason=reason)(test)
    marked: Callable[..., None] = pytest.mark.chart(skipped)
    return marked


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def anchors(guide: str) -> set[str]:
    """Links to headings as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.+)$", guide, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@needs_promtool
def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_alerts_fire_and_do_not() -> None:
    done = promtool("test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried_both_ways() -> None:
    tried: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            tried.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert set(alerts()) == {f"Cosytriton{kind}" for kind in KINDS}
    assert all(tried[name] == {False, True} for name in alerts())


@needs_promtool
@pytest.mark.chart
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expression", ["vector(1)", "vector(0) > 1"], ids=["always", "never"])
def test_an_alert_that_always_or_never_fires_is_noticed(kind: str, expression: str, tmp_path: Path) -> None:
    broken = deepcopy(yaml.safe_load(RULES.read_text()))
    (rule,) = [r for g in broken["groups"] for r in g["rules"] if r.get("alert") == f"Cosytriton{kind}"]
    rule["expr"] = expression
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(broken))
    tests = yaml.safe_load(TESTS.read_text()) | {"rule_files": ["alerts.yaml"]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", tmp_path / "tests.yaml")
    assert done.returncode != 0
    assert rule["alert"] in done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_runbook_is_in_the_guide(kind: str) -> None:
    document, anchor = alerts()[f"Cosytriton{kind}"]["annotations"]["runbook"].split("#")
    assert ROOT / document == GUIDE
    assert anchor in anchors(GUIDE.read_text(encoding="utf-8"))


def test_no_recorded_series_is_dead() -> None:
    """What is recorded is read by an alert or by the dashboard."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    readers = [rule["expr"] for rule in alerts().values()]
    readers.append(RULES.with_name("dashboard.json").read_text())
    assert {name for name in recorded if not any(name in reader for reader in readers)} == set()
