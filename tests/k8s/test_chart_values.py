"""Each value of the chart is in the schema, documented where it stands, and refuses a wrong type."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
WRONG: dict[str, Any] = {"string": 7, "integer": "seven", "number": "seven", "boolean": "yes", "array": {}}
PATH = tuple[str, ...]


def resolved(schema: Any) -> Any:
    """A schema with its reference followed."""
    return SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def closed(schema: Any) -> bool:
    """Whether a schema is of an object whose properties are named."""
    return "properties" in schema


def leaves(schema: Any = SCHEMA, path: PATH = ()) -> Iterator[tuple[PATH, Any]]:
    """Every value that is no group of others, with its schema."""
    for name, child in schema["properties"].items():
        if name == "global":  # Helm's own
            continue
        child = resolved(child)
        if closed(child):
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name), child


def objects(schema: Any) -> Iterator[Any]:
    """Every schema of an object, also inside of arrays and definitions."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for child in schema.values():
            yield from objects(child)


def wrong(schema: Any) -> Any:
    """A value of another type than the schema allows."""
    if "enum" in schema:
        return "no such word"
    kind = schema["type"]
    if kind == "object":
        return ["a list"]
    return WRONG[kind] if isinstance(kind, str) else []


def changed(path: PATH, value: Any) -> Any:
    """The chart's values with another one at `path`."""
    values = copy.deepcopy(VALUES)
    group = values
    for name in path[:-1]:
        group = group.setdefault(name, {})
    group[path[-1]] = value
    return values


def at(path: PATH) -> Any:
    value = VALUES
    for name in path:
        value = value[name]
    return value


LEAVES = dict(leaves())
IDS = [".".join(path) for path in LEAVES]
REFUSES = jsonschema.Draft7Validator(SCHEMA)


def test_the_defaults_fit_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


def test_every_object_of_the_schema_is_closed() -> None:
    """Named properties alone, or strings by any name; rules of a policy end in objects of Kubernetes."""
    for schema in objects({key: part for key, part in SCHEMA.items() if key != "properties"}):
        assert "additionalProperties" in schema or schema == {"type": "object"}
    for schema in objects(SCHEMA["properties"]):
        if schema != {"type": "object"}:
            assert schema["additionalProperties"] is False
            assert schema["properties"]


def test_schema_and_values_have_the_same_keys() -> None:
    def keys(values: Any, schema: Any, path: PATH = ()) -> Iterator[PATH]:
        for name, value in values.items():
            child = resolved(schema["properties"][name])
            if closed(child):
                yield from keys(value, child, (*path, name))
            else:
                yield (*path, name)

    assert set(keys(VALUES, SCHEMA)) == set(LEAVES)


@pytest.mark.parametrize("path", LEAVES, ids=IDS)
def test_a_wrong_type_is_refused(path: PATH) -> None:
    (error,) = REFUSES.iter_errors(changed(path, wrong(LEAVES[path])))
    assert tuple(error.absolute_path) == path


@pytest.mark.parametrize("path", LEAVES, ids=IDS)
def test_a_misspelt_name_is_refused(path: PATH) -> None:
    assert not REFUSES.is_valid(changed((*path[:-1], f"{path[-1]}x"), at(path)))


@pytest.mark.parametrize("path", [p for p in LEAVES if p[-2:-1] != ("resources",)], ids=".".join)
def test_no_value_may_be_taken_away(path: PATH) -> None:
    """`--set key=null` removes a default, and templates would render what nobody meant."""
    values = changed(path, None)
    group = values
    for name in path[:-1]:
        group = group[name]
    del group[path[-1]]
    assert not REFUSES.is_valid(values)


def documented() -> set[PATH]:
    """Values with a comment behind them or above them, by the indentation of values.yaml."""
    found: set[PATH] = set()
    path: list[str] = []
    above = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := re.match(r"( *)(\w+):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if " # " in line or above.strip().startswith("#"):
                found.add(tuple(path))
        above = line
    return found


def test_every_value_is_documented_where_it_stands() -> None:
    assert not [".".join(path) for path in set(LEAVES) - documented()]
