"""What a machine has, as far as serving asks: GPUs, TensorRT, processor, memory.

Facts alone: `doctor` judges them, manifests are compared with them. What cannot be found out is None, on any
platform; nothing here raises.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Self

PATIENCE = 120  # seconds for another program's answer; a library of a gigabyte loads slowly the first time
TENSORRT_LIBRARIES = ("libnvinfer.so.11", "libnvinfer.so.10")
LIBRARY_VERSION = """
from ctypes import CDLL
library = CDLL({!r})
parts = (getattr(library, f"getInferLib{{part}}Version")() for part in ("Major", "Minor", "Patch", "Build"))
print(*parts, sep=".")
"""
OLDEST_TENSORRT = (7, 5)  # compute capability
EXACT_INT8 = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"}  # the kernel's names
GPU_FIELDS = ("name", "compute_cap", "driver_version")  # of `nvidia-smi --query-gpu`


@dataclass(frozen=True, slots=True)
class Answer:
    """What another program wrote, and its exit status; negative if it did not start or was killed."""

    text: str
    log: str
    status: int

    @property
    def error(self) -> str:
        """The last line that it wrote, or "" when it did its work."""
        if self.status == 0:
            return ""
        # nvidia-smi complains on stdout, Python and the loader on stderr.
        lines = [line.strip() for line in f"{self.text}\n{self.log}".splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status}"


def ask(command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> Answer:
    """Run a program that only tells something, with additional environment variables."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            env={**os.environ, **(variables or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer("", str(error), -1)
    return Answer(done.stdout, done.stderr, done.returncode)


def ask_python(code: str) -> Answer:
    """Run Python code in a process of its own, which a broken library may end without ending this one."""
    return ask([sys.executable, "-P", "-c", code])  # -P: nothing from the current directory


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; its compute capability is major.minor, "8.9"."""

    name: str
    capability: str

    def __str__(self) -> str:
        return f"{self.name} {self.capability}"

    @property
    def runs_tensorrt(self) -> bool:
        """Whether TensorRT 10.5 and later know it, in FP16 and INT8; True where its capability is unknown."""
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.capability))
        return not numbers or numbers >= OLDEST_TENSORRT


@dataclass(frozen=True, slots=True)
class Nvidia:
    """What NVIDIA's driver says.

    Attributes:
        driver: its version, None where there is none.
        cuda: the newest CUDA version that the driver supports.
        gpus: every GPU that this process may use.
        error: why the driver does not answer though its tool is installed, "" if it does.

    """

    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str = ""

    @classmethod
    def here(cls) -> Self:
        """Ask nvidia-smi, if it is on PATH."""
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return cls()
        listed = ask([tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
        if listed.error:
            return cls(error=listed.error)
        rows = [[cell.strip() for cell in line.split(",")] for line in listed.text.splitlines()]
        rows = [row for row in rows if len(row) == len(GPU_FIELDS)]
        cuda = re.search(r"CUDA\D*Version\s*:\s*(\d+\.\d+)", ask([tool]).text)
        return cls(
            driver=rows[0][2] if rows else None,
            cuda=cuda[1] if cuda else None,
            gpus=tuple(Gpu(name, capability) for name, capability, _ in rows),
        )


@dataclass(frozen=True, slots=True)
class TensorRT:
    """TensorRT: its version if it loads, else why it does not; neither if it is absent."""

    version: str | None = None
    error: str = ""

    @classmethod
    def here(cls) -> Self:
        """Ask the `tensorrt` package, or the library alone, which is what Triton's container has.

        In processes of their own: it is large, and nothing else in this package may import it.
        """
        if find_spec("tensorrt") is not None:
            answer = ask_python("import tensorrt; print(tensorrt.__version__)")
            return cls(error=answer.error) if answer.error else cls(answer.text.split()[-1])
        answers = (ask_python(LIBRARY_VERSION.format(library)) for library in TENSORRT_LIBRARIES)
        return next((cls(answer.text.strip()) for answer in answers if not answer.error), cls())


@dataclass(frozen=True, slots=True)
class Machine:
    """What a TensorRT plan must fit.

    Attributes:
        gpu: name and compute capability of the first GPU, "NVIDIA L4 8.9"; None without one.
        tensorrt: version of TensorRT; None where it is not installed or does not load.

    """

    gpu: str | None
    tensorrt: str | None

    @classmethod
    def of(cls, nvidia: Nvidia, tensorrt: TensorRT) -> Self:
        """What these facts say about plans."""
        return cls(str(nvidia.gpus[0]) if nvidia.gpus else None, tensorrt.version)

    @classmethod
    @lru_cache(maxsize=1)
    def here(cls) -> Self:
        """This machine, asked once for each process."""
        return cls.of(Nvidia.here(), TensorRT.here())


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU: its model, how many cores this process may use, and the kernel's names of its features."""

    model: str | None
    cores: int
    features: frozenset[str] | None

    @classmethod
    def here(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> Self:
        """Read it from the kernel; elsewhere than on Linux little more than the cores is known."""
        fields = _fields(cpuinfo)
        names = fields.get("flags") or fields.get("Features")  # x86-64, aarch64
        return cls(
            model=fields.get("model name") or platform.processor() or None,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            features=frozenset(names.split()) if names else None,
        )

    @property
    def adds_int8_exactly(self) -> bool | None:
        """Whether it adds products of 8-bit integers in 32 bits; None where its features are unknown.

        AVX2 alone adds two of them in 16 bits, where u8 x s8 saturates.
        """
        return None if self.features is None else not self.features.isdisjoint(EXACT_INT8)


def memory_available(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int | None:
    """Bytes that new processes may take: what the kernel could free, or the container's limit if less."""
    available = re.match(r"(\d+) kB", _fields(meminfo).get("MemAvailable", ""))
    return min(_bytes_of(limit), int(available[1]) << 10) if available else None


def size_of(filesystem: Path) -> int | None:
    """Bytes that a file system holds, full or not; None where there is none."""
    try:
        return shutil.disk_usage(filesystem).total
    except OSError:
        return None


def _bytes_of(limit: Path) -> int:
    try:
        return int(limit.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return sys.maxsize


def _fields(path: Path) -> dict[str, str]:
    """The `name: value` lines of a file of the kernel; the first of a name counts."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}
