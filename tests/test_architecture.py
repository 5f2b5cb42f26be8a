"""The import rule: ensemble <- export, build_engines, client <- loadtests, bench; heavy libraries apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "cosytriton_ensemble": ROOT / "ensemble" / "cosytriton_ensemble",
    "cosytriton_export": ROOT / "export" / "cosytriton_export",
    "cosytriton_engines": ROOT / "build_engines" / "cosytriton_engines",
    "cosytriton_client": ROOT / "client" / "cosytriton_client",
    "cosytriton_bench": ROOT / "bench" / "cosytriton_bench",
    "cosytriton_loadtests": ROOT / "loadtests" / "cosytriton_loadtests",
}
FURTHER = {
    "cosytriton_bench": set(ROOMS),  # compares what the others make
    "cosytriton_loadtests": {"cosytriton_client"},  # which is what users' applications call
}
OWNERS = {
    "torch": {"cosytriton_export", "cosytriton_bench"},
    "onnx": {"cosytriton_export", "cosytriton_engines", "cosytriton_bench"},
    "transformers": {"cosytriton_bench"},
    "tensorrt": {"cosytriton_engines"},
    "tensorrt_rtx": {"cosytriton_engines"},
}
CLIENT_MAY_IMPORT = {"numpy", "tritonclient", "grpc", "soundfile", "cosytriton_client", "cosytriton_ensemble"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _files(room: Path) -> list[Path]:
    return sorted(room.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ROOMS)
def test_a_package_imports_itself_and_ensemble_alone(package: str) -> None:
    allowed = {package, "cosytriton_ensemble"} | FURTHER.get(package, set())
    for path in _files(ROOMS[package]):
        assert (_imports(path) & set(ROOMS)) <= allowed, path


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_stays_in_its_room(library: str) -> None:
    users = {package for package, room in ROOMS.items() for path in _files(room) if library in _imports(path)}
    assert users <= OWNERS[library]


def test_the_client_needs_numpy_and_tritonclient_alone() -> None:
    import sys

    for path in _files(ROOMS["cosytriton_client"]):
        assert _imports(path) - set(sys.stdlib_module_names) <= CLIENT_MAY_IMPORT, path


def test_what_the_client_takes_from_ensemble_is_light() -> None:
    """Transitively: no onnxruntime, psutil or tokenizers behind the client's imports."""
    import subprocess
    import sys

    code = "import sys, cosytriton_client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "onnx", "onnxruntime", "tokenizers", "psutil", "soundfile"} & set(loaded)


SOURCES = [
    p for room in (*ROOMS.values(), ROOT / "tests", ROOT / "loadtests", ROOT / "k8s") for p in _files(room)
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name
