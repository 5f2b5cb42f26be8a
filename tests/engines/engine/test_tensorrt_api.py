"""What the engines use of TensorRT and CUDA is there, in every version that is supported.

The bindings are untyped and need a GPU's libraries, so their names are kept in `stubs/api.json`, which
`stubs/surface.py` reads off the wheels. What is used is read off the sources: each object of the bindings has
a variable that is named for its class, in `OBJECTS`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STUBS = HERE.with_name("stubs")
ENGINES = HERE.parents[2] / "build_engines" / "cosytriton_engines" / "engine"

TENSORRT = ("tensorrt 10.12", "tensorrt 10.16", "tensorrt 11.4")
RTX = "tensorrt-rtx 1.7"
CUDA = ("cuda 12.9", "cuda 13.5")
SOURCES: Mapping[str, tuple[str, ...]] = {  # file -> versions that it is written for
    "builder.py": (*TENSORRT, RTX),
    "gate.py": (RTX,),
    "plan.py": TENSORRT,
    "language_model_plan.py": TENSORRT,
    "device.py": CUDA,
}
OBJECTS = {  # variable, also with an underscore before it -> class; "" is the module
    "trt": "",
    "cuda": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "tensor": "ITensor",
    "config": "IBuilderConfig",
    "optimization": "IOptimizationProfile",
    "cache": "ITimingCache",
    "memory": "IHostMemory",
    "logger": "ILogger",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
}

Api = Mapping[str, Mapping[str, str]]
"""Class -> `member(parameters) -> class` -> versions that have it."""


@dataclass(frozen=True)
class Use:
    """A member that a source names; without an optional one the source does something else."""

    owner: str
    member: str
    keywords: frozenset[str] = frozenset()
    optional: bool = False


@pytest.fixture(scope="module")
def api() -> Api:
    names: Api = json.loads((STUBS / "api.json").read_text(encoding="utf-8"))
    return names


def members(api: Api, owner: str, name: str) -> Iterator[tuple[str, str, list[str]]]:
    """Parameters, class of the result and versions of a member."""
    for line, versions in api.get(owner, {}).items():
        found = re.fullmatch(r"(\w+)(?:\((.*)\))?(?: -> (.*))?", line)
        assert found is not None, line
        if found[1] == name:
            yield (
                found[2] or "",
                found[3] or "",
                [*TENSORRT, RTX, *CUDA] if versions == "all" else versions.split(", "),
            )


class Reader(ast.NodeVisitor):
    """Collects the uses of a source; an object of the bindings under an unknown name is a fault."""

    def __init__(self, source: str, api: Api) -> None:
        self._api, self._tree = api, ast.parse(source)
        self.uses: set[Use] = set()
        self.faults: list[str] = []
        self._strings = {
            target.id: node.value.value
            for node in self._tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        classes = [node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]
        self._own = {m.name for c in classes for m in c.body if isinstance(m, ast.FunctionDef)}
        self.visit(self._tree)

    def owner(self, node: ast.expr) -> str | None:
        """The class of the bindings that an expression is of, None of others."""
        if isinstance(node, ast.Name):
            return OBJECTS.get(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._result(node.func)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return OBJECTS.get(node.attr.removeprefix("_"))
            return self._result(node)
        return None

    def _result(self, node: ast.Attribute) -> str | None:
        owner = self.owner(node.value)
        if owner is None:
            return None
        nested = f"{owner}.{node.attr}" if owner else node.attr
        if nested in self._api:
            return nested
        return next((result for _, result, _ in members(self._api, owner, node.attr) if result), None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node, frozenset())
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._note(node.func, frozenset(word.arg for word in node.keywords if word.arg))
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            owner, name = self.owner(node.args[0]), node.args[1]
            if owner is not None:
                text = name.value if isinstance(name, ast.Constant) else self._strings[ast.unparse(name)]
                optional = len(node.args) > 2 or node.func.id == "hasattr"
                self.uses.add(Use(owner, str(text), optional=optional))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """What a class that the bindings call overrides is a use; what only we call is our own."""
        for owner in filter(None, map(self.owner, node.bases)):
            called = {n.attr for n in ast.walk(self._tree) if isinstance(n, ast.Attribute)}
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            self.uses |= {Use(owner, m) for m in methods if not m.startswith("_") and m not in called}
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A variable that holds an object of the bindings must be named for its class."""
        owner = self.owner(node.value)
        for target in node.targets:
            if owner and isinstance(node.value, ast.Call) and self.owner(target) != owner:
                self.faults.append(f"{ast.unparse(target)} holds {owner}: name it for its class")
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """`Any` is an object of the bindings, or a plain value whose attributes are not read."""
        if node.annotation is not None and ast.unparse(node.annotation) == "Any" and node.arg not in OBJECTS:
            read = (n for n in ast.walk(self._tree) if isinstance(n, ast.Attribute))
            if any(isinstance(n.value, ast.Name) and n.value.id == node.arg for n in read):
                self.faults.append(f"the argument {node.arg} is Any: name it for its class")

    def _note(self, node: ast.Attribute, keywords: frozenset[str]) -> None:
        owner = self.owner(node.value)
        if owner is not None and not (
            node.attr in self._own and not list(members(self._api, owner, node.attr))
        ):
            self.uses.add(Use(owner, node.attr, keywords))


def faults(source: str, versions: tuple[str, ...], api: Api) -> list[str]:
    """What a source uses and a version does not have."""
    reader = Reader(source, api)
    found = list(reader.faults)
    for use in reader.uses:
        having = {
            version
            for parameters, _, known in members(api, use.owner, use.member)
            if use.keywords <= set(parameters.split(", "))
            for version in known
        }
        lacking = [version for version in versions if version not in having]
        if lacking and not (use.optional and len(lacking) < len(versions)):
            found.append(f"{use.owner or 'module'}.{use.member} {sorted(use.keywords)}: not in {lacking}")
    return found


def text(file: str) -> str:
    return (ENGINES / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", SOURCES)
def test_every_name_is_there_in_every_version(file: str, api: Api) -> None:
    assert faults(text(file), SOURCES[file], api) == []


def test_no_other_file_uses_the_bindings() -> None:
    for path in ENGINES.parent.rglob("*.py"):
        objects = re.findall(r"\b(?:trt|cuda)\.\w+", path.read_text(encoding="utf-8"))
        assert path.name in SOURCES or set(objects) <= {"cuda.bindings"}, path


@pytest.mark.parametrize("file", SOURCES)
def test_each_name_that_goes_away_is_noticed(file: str, api: Api) -> None:
    """A version without it, for each of them."""
    uses = Reader(text(file), api).uses
    assert uses
    for use in uses:
        kept = {line: v for line, v in api[use.owner].items() if not re.match(rf"{use.member}\b", line)}
        assert faults(text(file), SOURCES[file], {**api, use.owner: kept}), use


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("config.set_flag(trt.BuilderFlag.FP16)", "BuilderFlag.FP16 [] *not in ['tensorrt 11.4'"),
        ("config.int8_calibrator = None", "IBuilderConfig.int8_calibrator [] *not in ['tensorrt 11.4'"),
        ("config.set_timing_cache(cache, mismatch=True)", "IBuilderConfig.set_timing_cache ['mismatch']"),
        ("getattr(builder, 'build_engine', None)", "Builder.build_engine"),
        ("thing = builder.create_builder_config()", "thing holds IBuilderConfig"),
        ("def f(thing: Any): thing.build()", "argument thing is Any"),
        ("class Logger(trt.ILogger):\n def write(self): ...", "ILogger.write"),
        ("network.get_input(0).broadcast_over_batch", "ITensor.broadcast_over_batch"),
    ],
)
def test_a_name_that_is_not_there_is_a_fault(line: str, fault: str, api: Api) -> None:
    start, _, end = fault.partition(" *")
    (found,) = faults(line, SOURCES["builder.py"], api)
    assert found.startswith(start) or start in found
    assert end in found


@pytest.mark.parametrize(("stub", "versions"), [("fake_tensorrt.py", TENSORRT[1:]), ("fake_cuda.py", CUDA)])
def test_the_fakes_have_no_name_that_the_real_ones_have_not(
    stub: str, versions: tuple[str, ...], api: Api
) -> None:
    tree = ast.parse((STUBS / stub).read_text(encoding="utf-8"))
    functions = {("", n.name) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != "array"}
    methods = {
        (c.name, m.name)
        for c in tree.body
        if isinstance(c, ast.ClassDef)
        for m in c.body
        if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")
    }
    assert functions
    for owner, name in functions | methods:
        having = {version for _, _, known in members(api, owner, name) for version in known}
        assert having.issuperset(versions), (owner, name)


@pytest.mark.gate
def test_the_names_are_those_of_the_wheels(tmp_path: Path) -> None:
    """Downloads them; nothing is installed, and no GPU is needed."""
    fresh = tmp_path / "api.json"
    subprocess.run([sys.executable, str(STUBS / "surface.py"), str(fresh)], check=True)
    assert json.loads(fresh.read_text()) == json.loads((STUBS / "api.json").read_text())
    found = json.loads(fresh.read_text())
    for file, versions in SOURCES.items():
        assert faults(text(file), versions, found) == []
