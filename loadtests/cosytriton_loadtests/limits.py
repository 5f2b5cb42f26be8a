"""What a service promises.

A file of limits is TOML:

    [all]            over all requests of each stage of the load's shape
    [each]           for each scenario in each stage
    [scenario.NAME]  beside and instead of [each]
    [stage.NAME]     instead of the others, in this stage
    [run]            for the run as a whole
    [promise]        what makes a request count for the goodput

The measures are those of `statistics.Summary.value`, such as `first_audio_p95`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.statistics import ALL, Promise, Spread, Summary

DIFFERENT, MEMORY, SHARED_MEMORY = "different_answers", "memory_growth", "shared_memory_growth"
OF_RUN = {
    DIFFERENT: "answers that were not those of the same request served alone",
    MEMORY: "share by which a process grew once it had settled",
    SHARED_MEMORY: "share by which /dev/shm grew once it had settled",
}
AT_LEAST = ("c100", "answers_rate", "audio_rate", "goodput")  # of these, more is better
SECONDS = ("first_audio", "first_audible", "whole", "gap", "worst_underrun")
MEASURES = (
    *(f"{name}_{part}" for name in (*SECONDS, "rtf") for part in Spread.__slots__ if part != "count"),
    *("errors", *AT_LEAST),
)

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """Measure -> limit, for each section of the file.

    Attributes:
        all: over all requests of a stage.
        each: for each scenario.
        scenario, stage: by name, what is different there.
        run: of the run as a whole.
        promise: what makes a request count for the goodput.
    """

    all: Values = field(default_factory=dict)
    each: Values = field(default_factory=dict)
    scenario: Mapping[str, Values] = field(default_factory=dict)
    stage: Mapping[str, Values] = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    promise: Promise = field(default_factory=Promise)

    @classmethod
    def read(cls, path: Path) -> Limits:
        """From a TOML file.

        Raises:
            LoadTestError: there is no such file, or something in it is no limit.
        """
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls._of(given)
        except (OSError, ValueError) as error:
            raise LoadTestError(f"{path}: these are no limits: {error}.") from error

    @classmethod
    def _of(cls, given: dict[str, Any]) -> Limits:
        _check(given, [one.name for one in fields(cls)], "the file")
        promise = _values(given, "promise", [one.name for one in fields(Promise)])
        return cls(
            _values(given, "all", MEASURES),
            _values(given, "each", MEASURES),
            _named(given, "scenario"),
            _named(given, "stage"),
            _values(given, "run", list(OF_RUN)),
            Promise(**promise),
        )

    def of(self, summary: Summary) -> Values:
        """What holds for a row of the statistics."""
        there = self.stage.get(summary.stage, {})
        if summary.scenario == ALL:
            return {**self.all, **there}
        usual = {**self.each, **self.scenario.get(summary.scenario, {})}
        return {measure: there.get(measure, limit) for measure, limit in usual.items()}


def _named(given: Mapping[str, Any], kind: str) -> dict[str, dict[str, float]]:
    sections = _table(given, kind)
    return {name: _values(sections, name, MEASURES, kind) for name in sections}


def _values(
    given: Mapping[str, Any], name: str, allowed: Collection[str], kind: str = ""
) -> dict[str, float]:
    section = f"[{kind}.{name}]" if kind else f"[{name}]"
    table = _table(given, name)
    _check(table, allowed, section)
    for measure, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{measure} = {value!r} in {section}; a number is needed")
    return table


def _table(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = given.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {table!r}; it is a section, [{name}]")
    return table


def _check(table: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    for name in table:
        if name not in allowed:
            raise ValueError(f"{name!r} in {where}; allowed: {', '.join(allowed)}")
