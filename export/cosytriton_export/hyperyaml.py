"""Reads a checkpoint's HyperPyYAML file as plain data.

The official files describe Python objects by tags (`!new:package.Class`, `!name:package.function`,
`!apply:package.function`). Here a tag is only kept as text: nothing is imported and nothing is run.
References (`!ref <sample_rate>`, `!ref <chunk_size> * <token_mel_ratio>`) are resolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cosytriton_export.errors import CheckpointError

CONSTRUCTS = ("!new:", "!name:", "!apply:")
MAX_DEPTH = 50  # nesting of the file; the official ones stay below 10

_REFERENCE = re.compile(r"<([^<>]+)>")
# YAML 1.1, which PyYAML speaks, reads `1e-06` as text; HyperPyYAML reads it as a number.
_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Config(dict[str, Any]):
    """A mapping of the file.

    `tag` is its construct ("!new:a.b.C", "" without one), `arguments` the list of a construct that was
    given one, `where` its place in the file. `config[key]` with an unknown key is a `CheckpointError`.
    """

    def __init__(
        self, items: Mapping[str, Any], where: str, tag: str = "", arguments: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(items)
        self.where = where
        self.tag = tag
        self.arguments = arguments

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.where}: there is no key {key!r}; given are {sorted(self)}.")


@dataclass(frozen=True)
class _Reference:
    text: str
    line: int


def _refusal(problem: str, node: yaml.Node | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark if node else None)


class _Loader(yaml.SafeLoader):
    """SafeLoader whose tags are data, without aliases (which can blow up) and without repeated keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; refuse an alias and a nesting without end."""
        if self.check_event(yaml.AliasEvent):
            raise _refusal("aliases (*name) are not allowed", parent)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(f"it is nested deeper than {MAX_DEPTH}", parent)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _mapping(loader: _Loader, node: yaml.MappingNode, tag: str = "") -> Config:
    items: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or key in items:
            problem = (
                f"the key {key!r} is repeated" if isinstance(key, str) else f"the key {key!r} is no text"
            )
            raise _refusal(problem, key_node)
        items[key] = loader.construct_object(value_node, deep=True)
    return Config(items, f"line {_line(node)}", tag)


def _construct(loader: _Loader, node: yaml.Node) -> Any:
    """Keep a tagged node: a reference, or one of `CONSTRUCTS` as data."""
    tag = str(node.tag)
    if tag == "!ref" and isinstance(node, yaml.ScalarNode):
        return _Reference(str(node.value), _line(node))
    if not tag.startswith(CONSTRUCTS):
        raise _refusal(f"the construct {tag!r} is unknown; known are !ref, {', '.join(CONSTRUCTS)}", node)
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, tag)
    if isinstance(node, yaml.SequenceNode):
        arguments = tuple(loader.construct_object(child, deep=True) for child in node.value)
    else:
        arguments = (node.value,) if node.value else ()
    return Config({}, f"line {_line(node)}", tag, arguments)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor(None, _construct)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class _Resolver:
    """Replaces references by the values of the file's top-level keys; each key is resolved once."""

    def __init__(self, root: Config, name: str) -> None:
        self.root, self.name = root, name
        self.done: dict[str, Any] = {}
        self.active: list[str] = []

    def value(self, item: Any, where: str) -> Any:
        if isinstance(item, _Reference):
            return self.reference(item)
        if isinstance(item, Config):
            items = {key: self.value(child, f"{where}, {key}") for key, child in item.items()}
            arguments = tuple(self.value(child, where) for child in item.arguments)
            return Config(items, where, item.tag, arguments)
        if isinstance(item, list):
            return [self.value(child, where) for child in item]
        return item

    def key(self, key: str, line: int) -> Any:
        if key in self.active:
            raise CheckpointError(f"{self.name}, line {line}: <{key}> refers to itself.")
        if key not in self.root:
            raise CheckpointError(f"{self.name}, line {line}: <{key}> refers to a key that does not exist.")
        if key not in self.done:
            self.active.append(key)
            self.done[key] = self.value(self.root[key], f"{self.name}, {key}")
            self.active.pop()
        return self.done[key]

    def reference(self, reference: _Reference) -> Any:
        names: list[str] = _REFERENCE.findall(reference.text)
        if names and reference.text.strip() == f"<{names[0]}>":
            return self.key(names[0], reference.line)
        values = {f"v{i}": self.key(name, reference.line) for i, name in enumerate(names)}
        fields = iter(values)
        text = _REFERENCE.sub(lambda _: next(fields), reference.text)
        try:
            return _arithmetic(ast.parse(text.strip(), mode="eval").body, values)
        except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{self.name}, line {reference.line}: !ref {reference.text!r} is neither one <key> "
                f"nor sums and products of numbers ({error})."
            ) from error


def _arithmetic(node: ast.expr, values: Mapping[str, Any]) -> int | float:
    """Compute a sum or product of numbers; everything else is a ValueError."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_arithmetic(node.left, values), _arithmetic(node.right, values))
    elif isinstance(node, ast.Name) and node.id in values:
        result = values[node.id]
    elif isinstance(node, ast.Constant):
        result = node.value
    else:
        raise ValueError("other syntax")
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise ValueError(f"{result!r} is no number")
    return result


def load_hyperyaml(path: Path) -> Config:
    """Read the file at `path`; every mapping is a `Config`, every reference its value.

    Raises `CheckpointError`: it is no such file; the message names the file, the line and the construct.
    """
    try:
        root = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # _Loader is a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise CheckpointError(f"{path}{line}: {error.problem}. Nothing of the file was run.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no valid YAML ({error}). Nothing of the file was run.") from error
    if not isinstance(root, Config):
        raise CheckpointError(f"{path}: holds no mapping of keys to values, but {type(root).__name__}.")
    resolver = _Resolver(root, str(path))
    return Config({key: resolver.key(key, 0) for key in root}, str(path))
