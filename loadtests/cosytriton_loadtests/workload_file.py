"""Reads a workload from TOML; each complaint names the place, what was given and what is allowed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cosytriton_client import ClientError, Options
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.workload import (
    PROTOCOLS,
    STREAMS,
    Scenario,
    Speaker,
    Workload,
    check_share,
    recording,
)

_Made = TypeVar("_Made", Speaker, Scenario)


def read_workload(path: Path) -> Workload:
    """Read and check a workload, its recordings included.

    Raises:
        LoadTestError: the file is missing or says something that cannot be done.
    """
    return _Reader(path).workload()


class _Reader:
    """Turns the TOML into a workload; each complaint names the place, what was given and what is allowed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def workload(self) -> Workload:
        tables = self._tables()
        texts = {name: self._texts(f"texts.{name}", given) for name, given in tables["texts"].items()}
        voices = {name: self._speaker(f"voices.{name}", given) for name, given in tables["voices"].items()}
        scenarios = {
            name: self._scenario(f"scenarios.{name}", given, texts, voices)
            for name, given in tables["scenarios"].items()
        }
        workload = Workload(self._path, texts, voices, scenarios)
        try:
            workload.known_voices()
            for speaker in voices.values():
                if speaker.new:
                    recording(self._path.parent / speaker.wav, speaker.transcript)
        except ClientError as error:
            raise LoadTestError(f"{self._path}: {error}") from error
        return workload

    def _tables(self) -> dict[str, dict[str, Any]]:
        try:
            given = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise LoadTestError(
                f"{self._path}: the workload cannot be read ({error.strerror}); "
                "give a TOML file with [texts], [voices.NAME] and [scenarios.NAME]."
            ) from error
        except ValueError as error:
            raise LoadTestError(f"{self._path}: this is no TOML ({error}).") from error
        wanted = ("texts", "voices", "scenarios")
        self._known("the file", given, wanted)
        for name in wanted:
            if not isinstance(given.get(name), dict) or not given[name]:
                raise self._wrong(f"[{name}]", given.get(name), "a table that is not empty")
        return given

    def _texts(self, place: str, given: object) -> tuple[str, ...]:
        return self._strings(place, given)

    def _speaker(self, place: str, given: object) -> Speaker:
        speaker = self._made(place, given, Speaker)
        if bool(speaker.wav) == bool(speaker.name):
            raise self._wrong(
                place, given, "either wav (a recording) or name (of a voice that the server knows)"
            )
        if speaker.name and (speaker.new or speaker.transcript):
            raise self._wrong(
                place, given, "for a name neither new nor transcript: those belong to a recording"
            )
        return speaker

    def _scenario(
        self, place: str, given: object, texts: Mapping[str, object], voices: Mapping[str, object]
    ) -> Scenario:
        table = dict(given) if isinstance(given, dict) else given
        if isinstance(table, dict):
            for name, known in (("texts", texts), ("voices", voices)):
                table[name] = self._strings(f"{place}.{name}", table.get(name))
                for one in table[name]:
                    if one not in known:
                        raise self._wrong(f"{place}.{name}", one, f"one of {', '.join(known)}")
        scenario = self._made(place, table, Scenario)
        if scenario.weight <= 0:
            raise self._wrong(f"{place}.weight", scenario.weight, "a number above 0")
        if scenario.protocol not in PROTOCOLS:
            raise self._wrong(f"{place}.protocol", scenario.protocol, f"one of {', '.join(PROTOCOLS)}")
        for name in ("cancel_share", "bad_share"):
            check_share(getattr(scenario, name), f"{self._path}: {place}.{name}")
        if scenario.cancel_share and scenario.protocol not in STREAMS:
            raise self._wrong(f"{place}.cancel_share", scenario.cancel_share, "0: only a stream can be left")
        self._options(f"{place}.options", scenario.options)
        return scenario

    def _options(self, place: str, options: Mapping[str, object]) -> None:
        kinds = get_type_hints(Options)
        self._known(place, options, kinds)
        for name, value in options.items():
            choices = get_args(kinds[name])
            kind = (int, float) if kinds[name] is float else kinds[name]
            if choices and value not in choices:
                raise self._wrong(f"{place}.{name}", value, f"one of {', '.join(choices)}")
            if not choices and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
                raise self._wrong(f"{place}.{name}", value, f"a value of type {kinds[name].__name__}")

    def _made(self, place: str, given: object, kind: type[_Made]) -> _Made:
        """A dataclass from a table: keys known, types right."""
        if not isinstance(given, dict):
            raise self._wrong(place, given, "a table")
        hints = get_type_hints(kind)
        self._known(place, given, hints)
        for name, value in given.items():
            expected = (int, float) if hints[name] is float else get_origin(hints[name]) or hints[name]
            if not isinstance(value, expected) or isinstance(value, bool) != (expected is bool):
                raise self._wrong(f"{place}.{name}", value, f"a value of type {_plain(hints[name])}")
        return kind(**given)

    def _strings(self, place: str, given: object) -> tuple[str, ...]:
        if isinstance(given, list) and given and all(isinstance(one, str) and one.strip() for one in given):
            return tuple(given)
        raise self._wrong(place, given, "a list of strings, none of them empty")

    def _known(self, place: str, given: Mapping[str, object], allowed: Iterable[str]) -> None:
        for name in given:
            if name not in allowed:
                raise LoadTestError(
                    f"{self._path}: {place} has no {name!r}; allowed are {', '.join(allowed)}."
                )

    def _wrong(self, place: str, given: object, allowed: str) -> LoadTestError:
        return LoadTestError(f"{self._path}: {place} = {given!r}: allowed is {allowed}.")


def _plain(kind: Any) -> str:
    return str(getattr(get_origin(kind) or kind, "__name__", kind))
