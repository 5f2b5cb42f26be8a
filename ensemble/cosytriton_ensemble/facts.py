"""What a machine has and what is installed on it for serving, found out by trying it.

Facts alone, which `doctor` judges; nothing here raises. What is tried runs in a process of its own, because a
broken library may end the process that loads it.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from cosytriton_ensemble.machine import (
    Machine,
    Nvidia,
    Processor,
    TensorRT,
    ask,
    ask_python,
    memory_available,
    size_of,
)

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
STUB = "triton_python_backend_stub"
TRITON_WHEEL = "nvidia-pytriton"
FEATURES = {  # what helps on a CPU: the kernel's names of it
    "VNNI": {"avx512_vnni", "avx_vnni"},
    "AMX": {"amx_int8"},
    "BF16": {"avx512_bf16", "amx_bf16", "bf16"},
    "dot product": {"asimddp"},
}

# y = x + x for one float, opset 17: so small that only the provider itself can fail. Made by `onnx.helper`
# and kept as bytes, because onnx is not installed where models are served; a test makes it again.
ADDITION = bytes.fromhex(
    "0808 3a35 0a0e 0a01 78 0a01 78 1201 79 2203 416464 1201 67"
    "5a0f 0a01 78 120a 0a08 0801 1204 0a02 0801 620f 0a01 79 120a 0a08 0801 1204 0a02 0801 4204 0a00 1011"
)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class OnnxRuntime:
    """The `onnxruntime` package.

    Attributes:
        version: None where it is absent or does not import.
        listed: providers that it was compiled with, as `get_available_providers` says.
        loaded: those of them that have computed something here.
        error: why it does not import, "" if it does or is absent.
        cuda_error: why CUDA does not load though it is listed.

    """

    version: str | None = None
    listed: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    error: str = ""
    cuda_error: str = ""

    @classmethod
    def here(cls) -> Self:
        """Open a session on each provider."""
        if find_spec("onnxruntime") is None:
            return cls()
        answer = ask_python(
            f"import json; from {__name__} import try_providers; print(json.dumps(try_providers()))"
        )
        if answer.error:
            return cls(error=answer.error)
        found = json.loads(answer.text.splitlines()[-1])  # ONNX Runtime itself prints before it
        missed = CUDA_PROVIDER in found["listed"] and CUDA_PROVIDER not in found["loaded"]
        return cls(
            version=found["version"],
            listed=tuple(found["listed"]),
            loaded=tuple(found["loaded"]),
            cuda_error=_why_not_cuda(answer.log) if missed else "",
        )


def try_providers() -> dict[str, Any]:
    """ONNX Runtime's version, its providers and those that compute; to be run by `ask_python`."""
    import onnxruntime

    listed: list[str] = onnxruntime.get_available_providers()
    loaded = [name for name in listed if _computes(name)]
    return {"version": onnxruntime.__version__, "listed": listed, "loaded": loaded}


def _computes(provider: str) -> bool:
    import numpy as np
    import onnxruntime

    try:
        # A provider that does not load is left out, with a line on stderr, and the CPU computes instead.
        session = onnxruntime.InferenceSession(ADDITION, providers=[provider])
        (total,) = session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # noqa: BLE001  (ONNX Runtime's errors have no common base but this)
        sys.stderr.write(f"{provider}: {error}\n")
        return False
    return provider in session.get_providers() and bool(total == 2)


def _why_not_cuda(log: str) -> str:
    reasons = (r"providers_cuda\.\w+ with error: (.+)", rf"Failed to create {CUDA_PROVIDER}\. (.+)", r"(.+)")
    found = (re.search(reason, log) for reason in reasons)
    return next((match[1].strip() for match in found if match), "ONNX Runtime gives no reason")


@dataclass(frozen=True, slots=True)
class Triton:
    """The server.

    Attributes:
        wheel: version of the wheel that has the embedded one, None without it.
        container: whether a tritonserver is on PATH, as in NVIDIA's container.
        error: why the embedded server, or its stub that runs Python models, does not start.

    """

    wheel: str | None = None
    container: bool = False
    error: str = ""

    @classmethod
    def here(cls) -> Self:
        """Start the embedded server's programs, which end again at once."""
        folder = triton_folder()
        return cls(
            wheel=None if folder is None else installed(TRITON_WHEEL) or "of an unknown version",
            container=shutil.which("tritonserver") is not None,
            error="" if folder is None else start_error(folder),
        )


def triton_folder() -> Path | None:
    """Where the wheel has put the embedded server."""
    spec = find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "tritonserver"


def stub_of(folder: Path) -> Path:
    """The program that runs Python models with this interpreter's version of Python."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "python_backend_stubs" / python / STUB


def stub_libraries(folder: Path) -> str:
    """The LD_LIBRARY_PATH of a stub that is not in its place: the wheel's libraries and libpython."""
    return f"{folder.parents[1] / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"


def start_error(folder: Path) -> str:
    """Why the server or its stub does not start, "" if both do: then they only miss their arguments."""
    stub = stub_of(folder)
    if not stub.is_file():
        return f"{folder} has no stub for Python {stub.parent.name}"
    answers = (
        ask([folder / "bin" / "tritonserver", "--help"]),
        ask([stub], {"LD_LIBRARY_PATH": stub_libraries(folder)}),
    )
    # 127: the loader misses a library. A C library that is too old has no status of its own.
    failed = (a for a in answers if a.status < 0 or a.status == 127 or "GLIBC" in a.error)
    return next((answer.error for answer in failed), "")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a machine has.

    Attributes:
        system, architecture: as `platform` names them, "Linux" and "x86_64".
        python: its version.
        processor: the CPU.
        memory: bytes available, None if unknown.
        shared_memory: bytes that /dev/shm may hold, None where there is none.
        numpy: its version, None if it is absent.
        nvidia, tensorrt, onnxruntime, triton: what they say of themselves.

    """

    system: str
    architecture: str
    python: str
    processor: Processor
    memory: int | None
    shared_memory: int | None
    numpy: str | None
    nvidia: Nvidia
    tensorrt: TensorRT
    onnxruntime: OnnxRuntime
    triton: Triton

    @classmethod
    def here(cls, shared_memory: Path = Path("/dev/shm")) -> Self:
        """Look at this machine; a few seconds, most of them for libraries to load."""
        return cls(
            system=platform.system(),
            architecture=platform.machine(),
            python=platform.python_version(),
            processor=Processor.here(),
            memory=memory_available(),
            shared_memory=size_of(shared_memory),
            numpy=installed("numpy"),
            nvidia=Nvidia.here(),
            tensorrt=TensorRT.here(),
            onnxruntime=OnnxRuntime.here(),
            triton=Triton.here(),
        )

    @property
    def machine(self) -> Machine:
        """What a plan must fit."""
        return Machine.of(self.nvidia, self.tensorrt)

    @property
    def features(self) -> tuple[str, ...]:
        """Those of `FEATURES` that the CPU has; none where they are unknown."""
        has = self.processor.features or frozenset()
        return tuple(name for name, flags in FEATURES.items() if flags & has)

    @property
    def wheel_fits(self) -> bool:
        """Whether the embedded Triton exists for this platform."""
        return self.system == "Linux" and self.architecture == "x86_64"

    @property
    def serves(self) -> bool:
        """Whether a Triton is installed here, so that Python models run in this environment."""
        return self.triton.wheel is not None or self.triton.container
