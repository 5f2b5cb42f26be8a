"""The names of TensorRT's and CUDA's Python bindings, read off the wheels of several versions without a GPU.

    python tests/engines/stubs/surface.py tests/engines/stubs/api.json

writes them anew: for each class one entry a member, `name(parameters) -> class`, with the versions that have
it. The wheels are downloaded into a temporary folder, and nothing is installed. TensorRT's need libraries
that are not on PyPI; for an import, empty ones that gcc makes of `nvinfer.c` will do.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

HERE = Path(__file__).parent
WHEELS = {  # version -> requirement, module
    "tensorrt 10.12": ("tensorrt-cu12-bindings==10.12.0.36", "tensorrt_bindings"),
    "tensorrt 10.16": ("tensorrt-cu12-bindings==10.16.1.11", "tensorrt_bindings"),
    "tensorrt 11.4": ("tensorrt-cu12-bindings==11.4.0.106", "tensorrt_bindings"),
    "tensorrt-rtx 1.7": ("tensorrt-rtx-cu12-bindings==1.7.1.116", "tensorrt_rtx_bindings"),
    "cuda 12.9": ("cuda-bindings==12.9.4", "cuda.bindings.runtime"),
    "cuda 13.5": ("cuda-bindings==13.5.0", "cuda.bindings.runtime"),
}
LIBRARIES = re.compile(rb"\0(lib(?:nvinfer|nvonnxparser|tensorrt)\w*\.so\.\d+)(?=\0)")

# Classes whose members are listed, and functions.
CLASSES = (
    *(
        "Builder",
        "BuilderFlag",
        "IBuilderConfig",
        "IHostMemory",
        "INetworkDefinition",
        "IOptimizationProfile",
    ),
    *("IProgressMonitor", "ITensor", "ITimingCache", "MemoryPoolType", "NetworkDefinitionCreationFlag"),
    *("ILogger", "ILogger.Severity", "OnnxParser", "ParserError", "ErrorCode", "ComputeCapability"),
    *("Runtime", "ICudaEngine", "IExecutionContext", "TensorIOMode", "cudaError_t", "cudaMemcpyKind"),
)
FUNCTIONS = re.compile(
    r"__version__|nptype|cuda(Malloc|Free|Memcpy|Memset|Stream|GetError|GetDevice)[A-Za-z]*"
)
NUMBERS = set(dir(int))  # members of enumerations that are numbers


def main(target: Path) -> None:
    """Write the names of every version to `target`."""
    found: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for version, (requirement, module) in WHEELS.items():
            place = Path(folder) / version
            unpacked(requirement, place)
            for owner, member in json.loads(listed(place, module)):
                found.setdefault(owner, {}).setdefault(member, []).append(version)
    for members in found.values():
        for member, versions in members.items():
            members[member] = ["all"] if set(versions) >= family_of(versions[0]) else versions
    lines = {owner: {m: ", ".join(v) for m, v in sorted(found[owner].items())} for owner in sorted(found)}
    target.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def family_of(version: str) -> set[str]:
    """The versions of the same library, TensorRT's sibling included."""
    return {known for known in WHEELS if known.startswith(version[:4])}


def unpacked(requirement: str, place: Path) -> None:
    """Unpack a wheel, with stubs beside TensorRT's bindings for the libraries that they are linked with."""
    place.mkdir(parents=True)
    wanted = [requirement, "cuda-pathfinder==1.9.1"] if requirement.startswith("cuda") else [requirement]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(place), *wanted], check=True)
    for wheel in place.glob("*.whl"):
        with ZipFile(wheel) as archive:
            archive.extractall(place)
    for bindings in place.glob("tensorrt*/tensorrt*.so"):
        for name in set(LIBRARIES.findall(bindings.read_bytes())):
            library = bindings.with_name(name.decode())
            options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
            subprocess.run(["gcc", *options, str(HERE / "nvinfer.c")], check=True)


def listed(place: Path, module: str) -> str:
    """What `print_names` says in a process that has the unpacked wheels before all others."""
    command = [sys.executable, "-W", "ignore", __file__, "--module", module]
    libraries = ":".join(str(folder) for folder in place.glob("tensorrt*_bindings"))
    environment = {**os.environ, "PYTHONPATH": str(place), "LD_LIBRARY_PATH": libraries}
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout


def print_names(module: str) -> None:
    """Print [owner, member] of every name as JSON; the module's own names have the owner ""."""
    names = list(_names(importlib.import_module(module)))
    json.dump(names, sys.stdout)


def _names(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name in dir(module):
        if FUNCTIONS.fullmatch(name) or name in CLASSES:
            yield "", _described(name, getattr(module, name))
    for owner in CLASSES:
        outer, _, inner = owner.partition(".")
        found = getattr(module, outer, None)
        found = getattr(found, inner, None) if inner else found
        for name in dir(found) if found is not None else ():
            if not name.startswith("_") and not (owner.startswith("cuda") and name in NUMBERS):
                yield owner, _described(name, getattr(found, name))


def _described(name: str, member: object) -> str:
    """`name(parameters) -> class`, as the bindings say it in the docstring; `name` for the others."""
    if isinstance(member, type):
        return name
    getter = getattr(member, "fget", None)
    text = (getattr(getter, "__doc__", None) if getter else getattr(member, "__doc__", None)) or ""
    signatures = re.findall(r"^(?:\d+\. )?\w*\((.*)\)(?: -> (.*))?$", text, re.MULTILINE)
    result = next((_last(given) for _, given in signatures if given and _is_class(given)), "")
    if getter or not callable(member) or not signatures:
        return f"{name} -> {result}" if result else name
    parameters = {_parameter(p): None for s, _ in signatures for p in re.split(r", (?![^\[]*\])", s)}
    given = ", ".join(p for p in parameters if p not in ("", "self", "*args", "**kwargs"))
    return f"{name}({given})" + (f" -> {result}" if result else "")


def _parameter(text: str) -> str:
    """The name in "name: type = default", as in "size_t name"."""
    return text.partition(":")[0].partition("=")[0].strip().rpartition(" ")[2]


def _last(annotation: str) -> str:
    return annotation.rpartition(".")[2].rstrip("]").replace("nvonnxparser::I", "")


def _is_class(annotation: str) -> bool:
    return _last(annotation) in CLASSES


if __name__ == "__main__":
    if sys.argv[1] == "--module":
        print_names(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
