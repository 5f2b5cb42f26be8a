"""Run while an image is built, without a GPU: whether what lies in it fits together.

check.py              numpy, ONNX Runtime and tritonserver start
check.py --bindings   prints the requirement of TensorRT's Python bindings that the base's library needs
check.py --gpu        moreover TensorRT's bindings and the CUDA provider load, each of the right version
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from cosytriton_ensemble.doctor import examine
from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.facts import Facts
from cosytriton_ensemble.installation import Installation, version_numbers
from cosytriton_ensemble.machine import TensorRT

OLDEST_TENSORRT = (10, 15)  # which says what shares its memory: the caches of the language model
NEWEST_OPSET = 24  # of the exported graphs
ALIAS = "import sys\n\nimport tensorrt_bindings\n\nsys.modules[__name__] = tensorrt_bindings\n"


def bindings_requirement(library: str | None, cuda: str | None) -> str:
    """What pip is to install beside a TensorRT library of a base with some CUDA.

    SystemExit where there is no library, or one that is too old.
    """
    if library is None or version_numbers(library) < OLDEST_TENSORRT:
        wanted = ".".join(map(str, OLDEST_TENSORRT))
        raise SystemExit(f"The base has TensorRT {library or 'nowhere'}; take one with {wanted} or newer.")
    if cuda is None:
        raise SystemExit("The base does not say CUDA_VERSION; take one of nvcr.io/nvidia/tritonserver.")
    return f"tensorrt-cu{cuda.partition('.')[0]}-bindings=={library}.*"


def faults(facts: Facts, gpu: bool) -> Iterator[str]:
    """What does not fit."""
    for finding in examine(facts):
        # The host gives /dev/shm and the memory.
        if finding.state == "broken" and finding.subject != "shared memory":
            yield f"{finding.subject}: {finding.sentence}"
    if gpu:
        if facts.tensorrt.error:
            yield f"TensorRT: {facts.tensorrt.error}"
        try:
            Installation.here().check_opset(NEWEST_OPSET)
        except ServerError as error:
            yield str(error)
        yield from missing_libraries(onnxruntime_libraries())


def onnxruntime_libraries() -> list[Path]:
    """The providers of the installed ONNX Runtime, which it only loads where a GPU is."""
    spec = find_spec("onnxruntime")
    folder = Path((spec.submodule_search_locations or ["."])[0]) if spec else Path()
    return sorted(folder.glob("capi/libonnxruntime_providers_cuda.so"))


def missing_libraries(libraries: list[Path]) -> Iterator[str]:
    """What the loader does not find of what libraries are linked with."""
    if not libraries:
        yield "ONNX Runtime has no CUDA provider: onnxruntime-gpu is not installed"
    for library in libraries:
        answer = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
        yield from (f"{library.name}: {line.strip()}" for line in answer.splitlines() if "not found" in line)


def add_alias() -> None:
    """Give the bindings the name `tensorrt`, which the package on PyPI has that brings its own library."""
    spec = find_spec("tensorrt_bindings")
    if spec is not None and spec.origin is not None:
        (Path(spec.origin).parents[1] / "tensorrt.py").write_text(ALIAS, encoding="utf-8")


def main(argument: str = "") -> int:
    """See the top of this file."""
    if argument == "--bindings":
        sys.stdout.write(bindings_requirement(TensorRT.here().version, os.environ.get("CUDA_VERSION")) + "\n")
        return 0
    if argument == "--gpu":
        add_alias()
    found = list(faults(Facts.here(), argument == "--gpu"))
    sys.stderr.writelines(f"{fault}\n" for fault in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
