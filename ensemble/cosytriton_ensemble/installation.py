"""Which Triton serves: that of NVIDIA's container with its own backends, or the wheel's with stand-ins."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.facts import stub_libraries, stub_of, triton_folder
from cosytriton_ensemble.machine import ask_python

CONTAINER = Path("/opt/tritonserver")  # where NVIDIA's images have it
STAND_INS = Path(__file__).parent / "backends"  # of the C++ backends that the wheel lacks
PYTHON_STUB = "triton_python_backend_stub"
OPSETS = {24: (1, 24), 23: (1, 23)}  # the oldest ONNX Runtime that knows an opset; tried with its wheels
_RUNTIME_VERSION = """
from ctypes import CDLL, CFUNCTYPE, POINTER, c_char_p, c_void_p
base = CDLL({!r}).OrtGetApiBase
base.restype = POINTER(c_void_p)
print(CFUNCTYPE(c_char_p)(base()[1])().decode())
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver and what lies around it.

    Attributes:
        folder: with `bin`, `backends` and `caches`.
        container: whether it has C++ backends of its own.

    """

    folder: Path
    container: bool

    @classmethod
    def here(cls) -> Self:
        """The container's where there is one; ServerError when there is none at all."""
        if (CONTAINER / "bin" / "tritonserver").is_file():
            return cls(CONTAINER, container=True)
        folder = triton_folder()
        if folder is None:
            raise ServerError(
                "There is no tritonserver here. Run `pip install 'cosytriton[serve]'`, or serve in NVIDIA's "
                "Triton container."
            )
        return cls(folder, container=False)

    @property
    def libraries(self) -> str:
        """What LD_LIBRARY_PATH must begin with; "" where everything is in its place."""
        return "" if self.container else stub_libraries(self.folder)

    def has(self, backend: str) -> bool:
        """Whether it runs models of a backend."""
        return ((self.folder / "backends" if self.container else STAND_INS) / backend).is_dir()

    def backends(self, scratch: Path) -> Path:
        """The backend directory. The wheel's is laid out in `scratch`: Triton refuses links that lead out."""
        if self.container:
            return self.folder / "backends"
        stub = stub_of(self.folder)
        if not stub.is_file():
            raise ServerError(
                f"The embedded tritonserver has no stub for Python {stub.parent.name}; use Python 3.11."
            )
        python = scratch / "backends" / "python"
        python.mkdir(parents=True)
        for source in (*(self.folder / "backends" / "python").glob("*.*"), stub):
            shutil.copy2(source, python)
        shutil.copytree(STAND_INS, scratch / "backends", dirs_exist_ok=True)
        return scratch / "backends"

    def check_opset(self, opset: int) -> None:
        """Refuse graphs that the ONNX Runtime of the C++ backend cannot read, where its version is found."""
        needed = next((version for known, version in OPSETS.items() if opset >= known), (0, 0))
        for found in self._onnxruntime_versions():
            if version_numbers(found) < needed:
                raise ServerError(
                    f"Triton's onnxruntime backend in {self.folder} has ONNX Runtime {found}; the repository "
                    f"has a graph of opset {opset}, which needs {'.'.join(map(str, needed))} or newer. Serve "
                    "in a newer Triton container, or build a TensorRT profile."
                )

    def _onnxruntime_versions(self) -> Iterator[str]:
        """What each library of the C++ backend says of itself; none of the stand-in, which brings its own."""
        if self.container:
            for library in (self.folder / "backends" / "onnxruntime").glob("libonnxruntime.so*"):
                answer = ask_python(_RUNTIME_VERSION.format(str(library)))
                if not answer.error:
                    yield answer.text.strip()


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
