"""The README's table of deliberate differences from the official code: each row names its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Where it differs from the official code")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


@pytest.fixture(scope="module")
def tests() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_difference_has_a_test(row: list[str], tests: str) -> None:
    what, official, here, back, test = row
    assert what
    assert official != here
    assert back in ("", "yes")
    name = re.fullmatch(r"`(test_\w+)`", test)
    assert name, f"the row {what!r} names no test"
    assert f"def {name[1]}(" in tests, f"there is no test {name[1]}"


def test_what_can_be_switched_back_is_what_the_code_switches() -> None:
    """Last chunk, cross-fades, phase, minimum length, watchdog: where the code reads `official`."""
    assert sum(row[3] == "yes" for row in rows()) == 5
