"""What is wrong with a machine, and the command that mends it.

Functions of the facts alone, so that any machine can be examined anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.facts import CPU_PROVIDER, CUDA_PROVIDER, Facts
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import SUFFIX, VERSION, check_artifact
from cosytriton_ensemble.profiles import PROFILES
from cosytriton_ensemble.repository import check_repository

State = Literal["ok", "note", "broken"]
SHARED_MEMORY_MINIMUM = 256 << 20  # bytes; with the 64 MB of a plain container, tensors of 25 MB fail
INSTALL_SERVE = "pip install 'cosytriton[serve]'"
# The wheels put CUDA and cuDNN where the loader does not look by itself.
INSTALL_CUDA = (
    "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu[cuda,cudnn]' && "
    "export LD_LIBRARY_PATH=$(ls -d $(python -c 'import site; print(site.getsitepackages()[0])')"
    "/nvidia/*/lib | paste -sd:)"
)
REMOVE_CUDA = f"pip uninstall -y onnxruntime onnxruntime-gpu && {INSTALL_SERVE}  # or: docker run --gpus all"
RESTART_DRIVER = "sudo modprobe nvidia  # after an update of the driver: sudo reboot"
GROW_SHARED_MEMORY = (
    "sudo mount -o remount,size=2G /dev/shm  # container: docker run --shm-size 2g; chart: sharedMemory: 2Gi"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: a sentence, and the command that mends it if it is broken."""

    subject: str
    state: State
    sentence: str
    mend: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Every finding about the machine."""
    return [
        judge_system(facts),
        judge_processor(facts),
        judge_memory(facts),
        judge_shared_memory(facts),
        judge_numpy(facts),
        judge_driver(facts),
        *judge_gpus(facts),
        judge_tensorrt(facts),
        judge_onnxruntime(facts),
        *judge_cuda_provider(facts),
        judge_triton(facts),
    ]


def judge_system(facts: Facts) -> Finding:
    """Whether Triton exists for this operating system."""
    sentence = f"{facts.system} {facts.architecture}, Python {facts.python}"
    if facts.system == "Windows":
        return Finding("system", "note", f"{sentence}: Triton runs under WSL2 alone", "wsl --install")
    return Finding("system", "ok", sentence)


def judge_processor(facts: Facts) -> Finding:
    """The CPU, and what of it INT8 and BF16 can use."""
    processor = facts.processor
    sentence = f"{processor.model or 'model unknown'}, {processor.cores} cores"
    if processor.features is None:
        return Finding("processor", "note", f"{sentence}, features unknown")
    return Finding("processor", "ok", f"{sentence}, {', '.join(facts.features) or 'no VNNI, AMX or BF16'}")


def judge_memory(facts: Facts) -> Finding:
    """How much memory is there."""
    if facts.memory is None:
        return Finding("memory", "note", "unknown")
    return Finding("memory", "ok", f"{_size(facts.memory)} available")


def judge_shared_memory(facts: Facts) -> Finding:
    """Whether /dev/shm, through which Triton hands tensors to Python models, has room for a long request."""
    subject, size = "shared memory", facts.shared_memory
    if size is None:
        state: State = "broken" if facts.system == "Linux" and facts.serves else "note"
        return Finding(
            subject, state, "there is no /dev/shm", GROW_SHARED_MEMORY if state == "broken" else ""
        )
    if size < SHARED_MEMORY_MINIMUM:
        sentence = (
            f"/dev/shm has {_size(size)}: a long request fails, it needs {_size(SHARED_MEMORY_MINIMUM)}"
        )
        return Finding(subject, "broken", sentence, GROW_SHARED_MEMORY)
    return Finding(subject, "ok", f"/dev/shm has {_size(size)}")


def judge_numpy(facts: Facts) -> Finding:
    """Triton 24.10's Python stub hands out zeros with numpy 2, without any error."""
    mend = "pip install 'numpy<2'"
    if facts.numpy is None:
        return Finding("numpy", "broken", "not installed", mend)
    if int(facts.numpy.partition(".")[0]) < 2:
        return Finding("numpy", "ok", facts.numpy)
    if facts.serves:
        return Finding(
            "numpy", "broken", f"{facts.numpy}: Python models get zeros; they need numpy < 2", mend
        )
    return Finding(
        "numpy", "note", f"{facts.numpy}: right for the client, but a server needs numpy < 2", mend
    )


def judge_driver(facts: Facts) -> Finding:
    """NVIDIA's driver, and the CUDA that it supports."""
    nvidia = facts.nvidia
    if nvidia.error:
        return Finding("NVIDIA driver", "broken", f"nvidia-smi fails: {nvidia.error}", RESTART_DRIVER)
    if nvidia.driver is None:
        return Finding("NVIDIA driver", "ok", "none (no nvidia-smi on PATH): everything runs on the CPU")
    cuda = nvidia.cuda or "an unknown version"
    return Finding("NVIDIA driver", "ok", f"{nvidia.driver}, supports CUDA up to {cuda}")


def judge_gpus(facts: Facts) -> Iterator[Finding]:
    """The GPUs by kind; a plan fits one kind."""
    gpus = facts.nvidia.gpus
    kinds = dict.fromkeys(gpus)
    for kind in kinds:
        sentence = f"{gpus.count(kind)} x {kind.name}, compute capability {kind.capability}"
        if kind.runs_tensorrt:
            yield Finding("GPU", "ok", sentence)
        else:
            yield Finding("GPU", "note", f"{sentence}: too old for TensorRT, which begins at 7.5")
    if len(kinds) > 1:
        yield Finding("GPU", "note", f"several kinds: a plan fits one, and here that is {gpus[0]}")


def judge_tensorrt(facts: Facts) -> Finding:
    """TensorRT, which only machines with a GPU need."""
    tensorrt, nvidia = facts.tensorrt, facts.nvidia
    mend = f"pip install --force-reinstall tensorrt-cu{(nvidia.cuda or '12').partition('.')[0]}"
    if tensorrt.error:
        state: State = "broken" if nvidia.gpus else "note"
        return Finding("TensorRT", state, f"installed, but does not import: {tensorrt.error}", mend)
    if tensorrt.version is not None:
        return Finding("TensorRT", "ok", tensorrt.version)
    if nvidia.gpus:
        return Finding(
            "TensorRT", "note", "not installed: gpu_fp16 and gpu_int8 need it, in Triton's version", mend
        )
    return Finding("TensorRT", "ok", "not installed, and without a GPU not needed")


def judge_onnxruntime(facts: Facts) -> Finding:
    """ONNX Runtime, which computes whatever TensorRT does not."""
    runtime, subject = facts.onnxruntime, "ONNX Runtime"
    again = "pip install --force-reinstall onnxruntime"
    if runtime.error:
        return Finding(subject, "broken", f"installed, but does not import: {runtime.error}", again)
    if runtime.version is None:
        return Finding(subject, "broken" if facts.serves else "note", "not installed", INSTALL_SERVE)
    if CPU_PROVIDER not in runtime.loaded:
        return Finding(subject, "broken", f"{runtime.version} does not even compute on the CPU", again)
    names = ", ".join(name.removesuffix("ExecutionProvider") for name in runtime.loaded)
    return Finding(subject, "ok", f"{runtime.version}, computes on {names}")


def judge_cuda_provider(facts: Facts) -> Iterator[Finding]:
    """CUDA in ONNX Runtime: it may be listed and yet not load, and then the CPU computes in silence."""
    runtime, subject = facts.onnxruntime, "ONNX Runtime CUDA"
    if CUDA_PROVIDER in runtime.loaded:
        yield Finding(subject, "ok", "loads and computes")
    elif CUDA_PROVIDER in runtime.listed:
        sentence = f"is listed, but does not load, so that the CPU computes: {runtime.cuda_error}"
        mend = INSTALL_CUDA if facts.nvidia.gpus else REMOVE_CUDA
        yield Finding(subject, "broken", sentence, mend)
    elif runtime.version is not None and facts.nvidia.gpus:
        yield Finding(subject, "note", "this ONNX Runtime has none, so that the CPU computes", INSTALL_CUDA)


def judge_triton(facts: Facts) -> Finding:
    """The server, and the stub that runs its Python models."""
    triton = facts.triton
    if triton.error:
        return Finding("Triton", "broken", f"does not start: {triton.error}", _mend_triton(triton.error))
    if triton.wheel is not None:
        return Finding("Triton", "ok", f"nvidia-pytriton {triton.wheel}, server and Python stub start")
    if triton.container:
        return Finding("Triton", "ok", "tritonserver is on PATH, as in NVIDIA's container")
    if facts.wheel_fits:
        return Finding(
            "Triton", "note", "not installed: install it, or serve in the container", INSTALL_SERVE
        )
    return Finding(
        "Triton", "note", "not for this platform: serve in the container nvcr.io/nvidia/tritonserver"
    )


def _mend_triton(error: str) -> str:
    if library := re.search(r"libpython3\.\d+", error):
        return f"sudo apt-get install {library[0]}"
    if "no stub" in error:
        return f"python3.11 -m venv .venv && .venv/bin/{INSTALL_SERVE}"
    if "GLIBC" in error:
        return "docker run -it -v .:/src -w /src python:3.11  # the wheel needs glibc 2.35 or newer"
    return "pip install --force-reinstall nvidia-pytriton==0.7.0"


def examine_repository(repository: Path, machine: Machine) -> list[Finding]:
    """Every artifact that does not fit its manifest or this machine, and what the repository lacks."""
    artifacts = _artifacts(repository)
    refused: dict[str, Finding] = {}
    for artifact in artifacts:
        try:
            check_artifact(artifact, machine)
        except RepositoryError as error:
            refused[str(error)] = _refusal(str(artifact.relative_to(repository)), str(error))
    try:
        check_repository(repository)
    except RepositoryError as error:
        refused.setdefault(str(error), _refusal("repository", str(error)))
    whole = Finding("repository", "ok", f"{len(artifacts)} artifacts fit their manifests and this machine")
    return list(refused.values()) or [whole]


def _artifacts(repository: Path) -> list[Path]:
    """What has a manifest, and every graph and plan of a profile, which should have one."""
    names = {name for profile in PROFILES.values() for name in (profile.graph, profile.plan) if name}
    described = (
        path.with_name(path.name.removesuffix(SUFFIX)) for path in repository.glob(f"*/{VERSION}/?*{SUFFIX}")
    )
    present = (path for name in names for path in repository.glob(f"*/{VERSION}/{name}"))
    return sorted({*described, *present})


def _refusal(subject: str, message: str) -> Finding:
    commands = dict.fromkeys(re.findall(r"`(cosytriton [^`]+)`", message))
    return Finding(subject, "broken", message, " && ".join(commands))


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
