"""What is found out about a machine: this one, and made-up ones."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from cosytriton_ensemble.facts import (
    ADDITION,
    CPU_PROVIDER,
    CUDA_PROVIDER,
    STUB,
    Facts,
    OnnxRuntime,
    start_error,
    stub_of,
    triton_folder,
)
from cosytriton_ensemble.machine import (
    Gpu,
    Machine,
    Nvidia,
    Processor,
    TensorRT,
    ask,
    memory_available,
    size_of,
)

# As nvidia-smi writes them: the query, and the head of its table before and since driver 610.
QUERY = "NVIDIA L4, 8.9, 580.95.05\nNVIDIA A100-SXM4-80GB, 8.0, 580.95.05\n"
HEAD = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     |"
HEAD_610 = "| NVIDIA-SMI 610.57.04    KMD Version: 610.57.04    CUDA UMD Version: 13.3  |"


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def nvidia_smi(folder: Path, query: str = QUERY, head: str = HEAD) -> None:
    """A stand-in for NVIDIA's tool."""
    program(folder / "nvidia-smi", f'if [ $# -gt 0 ]; then printf "{query}"; else echo "{head}"; fi')


def package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


@pytest.fixture
def bin_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before everything else on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


@pytest.fixture
def site_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this process and its children import from first."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site"


def test_this_machine_is_what_other_tools_say_of_it() -> None:
    import onnxruntime

    facts = Facts.here()
    processor = psutil.Process().cpu_affinity()
    assert facts.system == os.uname().sysname
    assert facts.architecture == os.uname().machine
    assert facts.processor.cores == len(processor)
    assert facts.shared_memory == psutil.disk_usage("/dev/shm").total
    assert facts.numpy == version("numpy")
    assert facts.onnxruntime.version == version("onnxruntime")
    assert facts.onnxruntime.listed == tuple(onnxruntime.get_available_providers())
    assert CPU_PROVIDER in facts.onnxruntime.loaded
    assert facts.triton.wheel == version("nvidia-pytriton")
    assert facts.triton.error == ""
    assert facts.memory is not None
    assert facts.memory < 1.2 * psutil.virtual_memory().available
    assert facts.machine == Machine.here()


def test_cpu_features_are_those_that_lscpu_lists() -> None:
    listed = ask(["lscpu"]).text
    if "Flags:" not in listed:
        pytest.skip("lscpu lists no flags here")
    flags = listed.split("Flags:")[1].splitlines()[0].split()
    assert Processor.here().features == frozenset(flags)


def test_gpus_driver_and_cuda_come_from_nvidia_smi(bin_first: Path) -> None:
    nvidia_smi(bin_first)
    found = Nvidia.here()
    assert found.gpus == (Gpu("NVIDIA L4", "8.9"), Gpu("NVIDIA A100-SXM4-80GB", "8.0"))
    assert (found.driver, found.cuda, found.error) == ("580.95.05", "13.0", "")
    assert Machine.of(found, TensorRT("10.13.3.9")) == Machine("NVIDIA L4 8.9", "10.13.3.9")


def test_the_head_of_newer_drivers_is_read_too(bin_first: Path) -> None:
    nvidia_smi(bin_first, head=HEAD_610)
    assert Nvidia.here().cuda == "13.3"


def test_a_driver_that_does_not_answer_says_why(bin_first: Path) -> None:
    program(bin_first / "nvidia-smi", "echo NVML: Driver/library version mismatch; exit 18")
    assert Nvidia.here() == Nvidia(error="NVML: Driver/library version mismatch")


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Nvidia.here() == Nvidia()


@pytest.mark.parametrize(("capability", "known"), [("7.0", False), ("7.5", True), ("12.0", True), ("", True)])
def test_tensorrt_begins_at_7_5(capability: str, known: bool) -> None:
    assert Gpu("any", capability).runs_tensorrt is known


def test_tensorrt_is_asked_for_its_version(site_first: Path) -> None:
    package(site_first, "tensorrt", "__version__ = '10.13.3.9'")
    assert TensorRT.here() == TensorRT("10.13.3.9")


def test_tensorrt_that_does_not_import_says_why(site_first: Path) -> None:
    package(site_first, "tensorrt", "raise ImportError('libnvinfer.so.10: cannot open')")
    assert TensorRT.here() == TensorRT(error="ImportError: libnvinfer.so.10: cannot open")


def test_a_library_that_ends_its_process_is_only_a_fact(site_first: Path) -> None:
    package(site_first, "onnxruntime", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert OnnxRuntime.here() == OnnxRuntime(error="it ended with status -4")


def test_tensorrt_without_its_package_is_found_by_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"Major": 10, "Minor": 13, "Patch": 3, "Build": 9}
    source = "".join(f"int getInferLib{part}Version() {{ return {n}; }}\n" for part, n in parts.items())
    (tmp_path / "nvinfer.c").write_text(source)
    try:
        command = ["cc", "-shared", "-fPIC", "-o", "libnvinfer.so.10", "nvinfer.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert TensorRT.here() == TensorRT("10.13.3.9")


def test_aarch64_names_its_features_differently(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp bf16\nCPU part\t: 0xd0c\n")
    assert Processor.here(cpuinfo).features == frozenset(("fp", "asimd", "asimddp", "bf16"))


def test_without_the_files_of_linux_facts_are_unknown(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    processor = Processor.here(nowhere)
    assert processor.features is None
    assert processor.cores > 0
    assert memory_available(nowhere, nowhere) is None
    assert size_of(nowhere) is None


@pytest.mark.parametrize(("limit", "available"), [("max", 8 << 30), (f"{2 << 30}", 2 << 30)])
def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path, limit: str, available: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert memory_available(tmp_path / "meminfo", tmp_path / "memory.max") == available


def test_the_graph_of_the_probe_is_an_addition() -> None:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    assert helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString() == ADDITION


def test_cuda_that_is_listed_but_does_not_load_is_not_loaded(site_first: Path) -> None:
    package(site_first, "onnxruntime", ONNXRUNTIME_WITHOUT_CUDA)
    found = OnnxRuntime.here()
    assert found.listed == (CUDA_PROVIDER, CPU_PROVIDER)
    assert found.loaded == (CPU_PROVIDER,)
    assert found.cuda_error == "libcublasLt.so.13: cannot open shared object file"


# What onnxruntime-gpu 1.31 does where there is no CUDA: it complains, and computes on the CPU.
ONNXRUNTIME_WITHOUT_CUDA = """
import sys
__version__ = "1.31.1"
def get_available_providers():
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]
class InferenceSession:
    def __init__(self, graph, providers):
        if providers == ["CUDAExecutionProvider"]:
            print("EP Error")
            sys.stderr.write("Failed to load library libonnxruntime_providers_cuda.so with error: "
                             "libcublasLt.so.13: cannot open shared object file\\n"
                             "Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*.\\n")
    def get_providers(self):
        return ["CPUExecutionProvider"]
    def run(self, outputs, feed):
        return [feed["x"] + feed["x"]]
"""


def wheel(site: Path, stub: Path) -> Path:
    """The embedded Triton, with another stub for this version of Python."""
    real = triton_folder()
    assert real is not None
    package(site, "pytriton", "")
    folder = site / "pytriton" / "tritonserver"
    program(folder / "bin" / "tritonserver", f"exec {real / 'bin' / 'tritonserver'} $*")
    (site / "nvidia_pytriton.libs").symlink_to(real.parents[1] / "nvidia_pytriton.libs")
    link = stub_of(folder)
    link.parent.mkdir(parents=True)
    link.symlink_to(stub)
    return folder


def test_the_stub_starts(tmp_path: Path) -> None:
    real = triton_folder()
    assert real is not None
    assert start_error(wheel(tmp_path, stub_of(real))) == ""


def test_a_stub_that_misses_its_libpython_does_not_start(tmp_path: Path) -> None:
    real = triton_folder()
    assert real is not None
    stub = real / "python_backend_stubs" / "3.8" / STUB  # its libpython3.8 is not installed
    assert "libpython3.8.so.1.0: cannot open" in start_error(wheel(tmp_path, stub))


def test_a_wheel_without_a_stub_for_this_python_says_so(tmp_path: Path) -> None:
    assert "no stub for Python 3." in start_error(wheel(tmp_path, tmp_path / "nothing"))


def test_a_c_library_that_is_too_old_is_noticed(tmp_path: Path) -> None:
    stub = program(tmp_path / "stub", "echo \"version 'GLIBC_2.34' not found\" >&2; exit 1")
    assert "GLIBC_2.34" in start_error(wheel(tmp_path, stub))
