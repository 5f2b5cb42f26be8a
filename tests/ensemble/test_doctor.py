"""Each planted fault is found, with the command that mends it; and each machine is advised well."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosytriton_ensemble.advice import recommend
from cosytriton_ensemble.doctor import Finding, examine, examine_repository
from cosytriton_ensemble.doctor_command import as_json, as_table
from cosytriton_ensemble.facts import CPU_PROVIDER, CUDA_PROVIDER, Facts, OnnxRuntime, Triton
from cosytriton_ensemble.machine import Gpu, Machine, Nvidia, Processor, TensorRT
from cosytriton_ensemble.manifest import Manifest, sha256

L4, T4, V100 = Gpu("NVIDIA L4", "8.9"), Gpu("Tesla T4", "7.5"), Gpu("Tesla V100", "7.0")
TENSORRT = TensorRT("10.13.3.9")
LAPTOP = Facts(
    system="Linux",
    architecture="x86_64",
    python="3.11.7",
    processor=Processor("Some CPU", 8, frozenset({"avx2", "avx_vnni"})),
    memory=16 << 30,
    shared_memory=8 << 30,
    numpy="1.26.4",
    nvidia=Nvidia(),
    tensorrt=TensorRT(),
    onnxruntime=OnnxRuntime("1.32.0", (CPU_PROVIDER,), (CPU_PROVIDER,)),
    triton=Triton("0.7.0"),
)
BARE = Processor(None, 8, None)
UNKNOWN = replace(LAPTOP, processor=BARE, memory=None, shared_memory=None, triton=Triton())
CUDA_RUNTIME = OnnxRuntime("1.31.1", (CUDA_PROVIDER, CPU_PROVIDER), (CUDA_PROVIDER, CPU_PROVIDER))
CUDA_THAT_DOES_NOT_LOAD = replace(CUDA_RUNTIME, loaded=(CPU_PROVIDER,), cuda_error="libcublasLt.so.13")


def with_gpus(*gpus: Gpu, tensorrt: TensorRT = TENSORRT) -> Facts:
    nvidia = Nvidia("580.95.05", "13.0", gpus)
    return replace(LAPTOP, nvidia=nvidia, tensorrt=tensorrt, onnxruntime=CUDA_RUNTIME)


def troubles(facts: Facts) -> list[Finding]:
    return [f for f in examine(facts) if f.state != "ok"]


@pytest.mark.parametrize("facts", [LAPTOP, with_gpus(L4), with_gpus(L4, L4)], ids=["cpu", "gpu", "gpus"])
def test_a_healthy_machine_has_no_trouble(facts: Facts) -> None:
    assert troubles(facts) == []


FAULTS = {
    "numpy 2": (replace(LAPTOP, numpy="2.1.3"), "numpy", "2.1.3", "pip install 'numpy<2'"),
    "small /dev/shm": (replace(LAPTOP, shared_memory=64 << 20), "shared memory", "64 MiB", "--shm-size 2g"),
    "no /dev/shm": (replace(LAPTOP, shared_memory=None), "shared memory", "no /dev/shm", "mount"),
    "driver": (
        replace(LAPTOP, nvidia=Nvidia(error="Driver/library version mismatch")),
        "NVIDIA driver",
        "mismatch",
        "modprobe nvidia",
    ),
    "TensorRT": (
        with_gpus(L4, tensorrt=TensorRT(error="libnvinfer.so.10")),
        "TensorRT",
        "libnvinfer.so.10",
        "pip install --force-reinstall tensorrt-cu13",
    ),
    "CUDA": (
        replace(with_gpus(L4), onnxruntime=CUDA_THAT_DOES_NOT_LOAD),
        "ONNX Runtime CUDA",
        "libcublasLt.so.13",
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    ),
    "CUDA without a GPU": (
        replace(LAPTOP, onnxruntime=CUDA_THAT_DOES_NOT_LOAD),
        "ONNX Runtime CUDA",
        "does not load",
        "docker run --gpus all",
    ),
    "no ONNX Runtime": (
        replace(LAPTOP, onnxruntime=OnnxRuntime()),
        "ONNX Runtime",
        "not installed",
        "pip install 'cosytriton[serve]'",
    ),
    "ONNX Runtime": (
        replace(LAPTOP, onnxruntime=OnnxRuntime(error="it ended with status -4")),
        "ONNX Runtime",
        "status -4",
        "pip install --force-reinstall onnxruntime",
    ),
    "libpython": (
        replace(LAPTOP, triton=Triton("0.7.0", error="libpython3.11.so.1.0: cannot open")),
        "Triton",
        "libpython3.11.so.1.0",
        "apt-get install libpython3.11",
    ),
    "stub": (
        replace(LAPTOP, triton=Triton("0.7.0", error="x has no stub for Python 3.14")),
        "Triton",
        "no stub for Python 3.14",
        "python3.11 -m venv",
    ),
    "a library of the wheel": (
        replace(LAPTOP, triton=Triton("0.7.0", error="libcudart-09529672.so: cannot open")),
        "Triton",
        "libcudart",
        "pip install --force-reinstall nvidia-pytriton",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_alone_with_what_mends_it(fault: str) -> None:
    facts, subject, sentence, mend = FAULTS[fault]
    (finding,) = troubles(facts)
    assert (finding.state, finding.subject) == ("broken", subject)
    assert sentence in finding.sentence
    assert mend in finding.mend


NOTES = {
    "a client alone may have numpy 2": replace(LAPTOP, numpy="2.1.3", triton=Triton()),
    "an old GPU": with_gpus(V100),
    "GPUs of several kinds": with_gpus(L4, T4),
    "a GPU without TensorRT": with_gpus(L4, tensorrt=TensorRT()),
    "a GPU without CUDA in ONNX Runtime": replace(with_gpus(L4), onnxruntime=LAPTOP.onnxruntime),
    "TensorRT that nothing needs": replace(LAPTOP, tensorrt=TensorRT(error="no libcuda.so.1")),
    "macOS": replace(UNKNOWN, system="Darwin", architecture="arm64"),
    "Windows": replace(UNKNOWN, system="Windows", architecture="AMD64"),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_is_not_needed_is_only_noted(note: str) -> None:
    assert {finding.state for finding in troubles(NOTES[note])} == {"note"}


def cpu(*features: str, architecture: str = "x86_64", system: str = "Linux") -> Facts:
    processor = Processor("any", 4, frozenset(features))
    return replace(LAPTOP, processor=processor, architecture=architecture, system=system)


ADVICE = {
    "several GPUs": (with_gpus(L4, L4), "gpu_fp16", "2 GPUs"),
    "several GPUs, TensorRT not yet installed": (
        with_gpus(L4, L4, tensorrt=TensorRT()),
        "gpu_fp16",
        "gpu_int8",
    ),
    "one GPU with TensorRT": (with_gpus(T4), "gpu_fp16", "gpu_int8"),
    "one GPU without TensorRT": (with_gpus(L4, tensorrt=TensorRT()), "gpu", "without TensorRT"),
    "old GPUs": (with_gpus(V100, V100), "gpu", "7.5"),
    "VNNI of AVX-512": (cpu("avx512_vnni"), "cpu_int8", "VNNI"),
    "VNNI of AVX2": (cpu("avx_vnni"), "cpu_int8", "VNNI"),
    "AMX": (cpu("amx_int8"), "cpu_int8", "AMX"),
    "BF16 alone does not help INT8": (cpu("amx_bf16"), "cpu", "saturate"),
    "AVX2 alone": (cpu("avx2"), "cpu", "saturate"),
    "a CPU that tells nothing": (UNKNOWN, "cpu", "unknown"),
    "Graviton": (cpu("asimddp", architecture="aarch64"), "cpu", "dot product"),
    "an old ARM": (cpu("asimd", architecture="aarch64"), "cpu", "container"),
    "Apple": (cpu(architecture="arm64", system="Darwin"), "cpu", "container"),
    "Windows": (cpu("avx_vnni", architecture="AMD64", system="Windows"), None, "DirectML"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str) -> None:
    facts, profile, reason = ADVICE[case]
    advice = recommend(facts)
    assert (advice.profile and advice.profile.name) == profile
    assert reason in advice.reason


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (6, 4), (8, 4), (64, 32)])
def test_many_cores_are_divided_between_the_stages_that_compute_at_a_time(cores: int, threads: int) -> None:
    assert recommend(replace(LAPTOP, processor=replace(BARE, cores=cores))).threads == threads


@pytest.fixture
def repository(tiny_repository: Path, tmp_path: Path) -> Path:
    """A repository whose flow also has a plan, built on an L4."""
    copy = tmp_path / "model_repository"
    shutil.copytree(tiny_repository, copy)
    folder = copy / "flow" / "1"
    plan = folder / "model.fp16.plan"
    plan.write_bytes(b"a plan")
    exported = Manifest.read(folder / "model.onnx")
    replace(
        exported,
        artifact=plan.name,
        files={plan.name: sha256(plan)},
        precision="fp16",
        source=dict(exported.files),
        tolerance={"error": 0.1},
        errors={"error": 0.01},
        tensorrt=TENSORRT.version,
        gpu=str(L4),
    ).write(folder)
    return copy


def test_artifacts_that_fit_are_counted(repository: Path) -> None:
    (finding,) = examine_repository(repository, with_gpus(L4).machine)
    graphs = len(list(repository.glob("*/1/*.onnx")))
    assert (finding.subject, finding.state) == ("repository", "ok")
    assert finding.sentence.startswith(f"{graphs + 3} artifacts")  # a plan, a tokenizer, the speakers


@pytest.mark.parametrize(
    "machine", [Machine("Tesla T4 7.5", "10.13.3.9"), Machine("NVIDIA L4 8.9", "10.9.0")]
)
def test_a_plan_of_another_machine_is_refused(repository: Path, machine: Machine) -> None:
    (finding,) = examine_repository(repository, machine)
    assert (finding.subject, finding.state) == ("flow/1/model.fp16.plan", "broken")
    assert "NVIDIA L4 8.9" in finding.sentence or "10.9.0" in finding.sentence
    assert finding.mend == f"cosytriton build --profile gpu_fp16 --repository {repository}"


def test_every_refused_artifact_is_listed(repository: Path) -> None:
    (repository / "vocoder" / "1" / "model.onnx").write_bytes(b"another")
    (repository / "prompt_mel" / "1" / "model.int8.onnx").write_bytes(b"left behind by a killed build")
    findings = examine_repository(repository, with_gpus(L4).machine)
    assert {finding.subject: finding.mend.split(" --repository")[0] for finding in findings} == {
        "prompt_mel/1/model.int8.onnx": "cosytriton build --profile cpu_int8",
        "vocoder/1/model.onnx": "cosytriton export CHECKPOINT",
    }


def test_an_empty_repository_lacks_everything(tmp_path: Path) -> None:
    (finding,) = examine_repository(tmp_path, LAPTOP.machine)
    assert finding.state == "broken"
    assert "flow/1/model.onnx" in finding.sentence
    assert f"cosytriton export CHECKPOINT --repository {tmp_path}" in finding.mend


def test_the_table_is_aligned_and_its_commands_can_be_copied() -> None:
    facts = FAULTS["CUDA"][0]
    findings = examine(facts)
    lines = as_table(findings, recommend(facts)).splitlines()
    (mend,) = (finding.mend for finding in findings if finding.mend)
    column = lines[0].index("Linux x86_64")
    assert f"{' ' * column}-> {mend}" in lines
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines if line)
    assert any(line.split()[:2] == ["profile", "gpu_fp16."] for line in lines)
    assert lines[-1].split()[:2] == ["threads", "4"]


def test_the_json_has_facts_findings_and_advice() -> None:
    whole = json.loads(as_json(LAPTOP, examine(LAPTOP), recommend(LAPTOP)))
    assert whole["facts"]["processor"]["features"] == ["avx2", "avx_vnni"]
    assert whole["facts"]["onnxruntime"]["loaded"] == ["CPUExecutionProvider"]
    assert {finding["state"] for finding in whole["findings"]} == {"ok"}
    assert whole["advice"]["profile"] == "cpu_int8"
    assert whole["advice"]["threads"] == 4


def doctor(*arguments: str, **variables: str) -> tuple[int, Any]:
    """Exit status and output of `cosytriton doctor --json`."""
    code = (
        "import argparse, sys; from cosytriton_ensemble.doctor_command import DOCTOR; "
        "parser = argparse.ArgumentParser(); DOCTOR.arguments(parser); "
        "sys.exit(DOCTOR.run(parser.parse_args()))"
    )
    command = [sys.executable, "-c", code, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_this_machine(tiny_repository: Path) -> None:
    status, whole = doctor("--repository", str(tiny_repository))
    states = {finding["subject"]: finding["state"] for finding in whole["findings"]}
    assert {states[name] for name in ("numpy", "ONNX Runtime", "Triton", "repository")} == {"ok"}
    assert status == int("broken" in states.values())
    flags = Path("/proc/cpuinfo").read_text()
    if whole["facts"]["nvidia"]["gpus"] == [] and os.uname().machine == "x86_64":
        int8 = any(name in flags for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
        assert whole["advice"]["profile"] == ("cpu_int8" if int8 else "cpu")


def test_faults_that_are_really_planted(repository: Path, tmp_path: Path) -> None:
    """numpy 2, a Triton without its stub, a TensorRT, and another GPU than the one of the plan."""
    site = tmp_path / "site"
    for name, text in {
        "numpy-2.1.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.3\n",
        "pytriton/__init__.py": "",
        "tensorrt/__init__.py": f"__version__ = '{TENSORRT.version}'",
        "bin/nvidia-smi": '#!/bin/sh\n[ $# = 0 ] && echo "CUDA Version: 12.4" || echo "Tesla T4, 7.5, 550"',
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "bin" / "nvidia-smi").chmod(0o755)
    path = f"{site / 'bin'}:{os.environ['PATH']}"
    status, whole = doctor("--repository", str(repository), PYTHONPATH=str(site), PATH=path)
    mends = {f["subject"]: f["mend"] for f in whole["findings"] if f["state"] == "broken"}
    assert status == 1
    assert whole["advice"]["profile"] == "gpu_fp16"
    assert mends["numpy"] == "pip install 'numpy<2'"
    assert "python3.11 -m venv" in mends["Triton"]
    assert mends["flow/1/model.fp16.plan"].startswith("cosytriton build --profile gpu_fp16")
