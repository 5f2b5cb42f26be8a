"""Which profile a machine should serve, and with how many threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cosytriton_ensemble.facts import Facts
from cosytriton_ensemble.profiles import CPU, CPU_INT8, GPU, GPU_FP16, GPU_INT8, Profile

FEW_CORES = 4  # that are not divided: a graph alone makes use of all


@dataclass(frozen=True, slots=True)
class Advice:
    """A profile, or None where Triton does not run, and why; `threads` that each graph computes with."""

    profile: Profile | None
    reason: str
    threads: int = 0  # every core


def recommend(facts: Facts) -> Advice:
    """The profile that serves fastest with what is there: GPUs before the CPU, TensorRT before CUDA."""
    if facts.system == "Windows":
        return Advice(
            None,
            "Triton does not run on Windows: serve under WSL2, where this command advises again, "
            "or run the graphs themselves with ONNX Runtime DirectML (onnxruntime-directml).",
        )
    advice = _on_gpu(facts) if facts.nvidia.gpus else _on_cpu(facts)
    return replace(advice, threads=threads_for(facts.processor.cores))


def threads_for(cores: int) -> int:
    """Threads of each graph: every core of a few, else half, for two stages compute at a time.

    While a request is in the flow, the next one is in the language model. Threads that wait sleep, so that on
    a few cores sharing them costs less than leaving some idle when only one stage has work.
    """
    return cores if cores <= FEW_CORES else max(FEW_CORES, cores // 2)


def _on_gpu(facts: Facts) -> Advice:
    gpus = facts.nvidia.gpus
    which = str(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} GPUs"
    if not all(gpu.runs_tensorrt for gpu in gpus):
        return Advice(GPU, f"{which}: below compute capability 7.5 there is CUDA, but no TensorRT.")
    if len(gpus) == 1 and facts.tensorrt.version is None:
        return Advice(
            GPU,
            f"{which} without TensorRT: ONNX Runtime's CUDA needs no plans. "
            f"With TensorRT installed it would be {GPU_FP16.name}.",
        )
    plans = "plans are built once for their kind" if len(gpus) > 1 else "TensorRT is there to build its plans"
    return Advice(
        GPU_FP16,
        f"{which}: {plans}, `cosytriton build --profile {GPU_FP16.name}`. With a calibration set, "
        f"{GPU_INT8.name} may be faster still. Both are served by Triton's container.",
    )


def _on_cpu(facts: Facts) -> Advice:
    features = facts.features
    if facts.architecture.lower() in ("aarch64", "arm64"):
        dot = (
            " INT8 has dot product instructions here: measure cpu_int8 too."
            if "dot product" in features
            else ""
        )
        return Advice(
            CPU, f"No GPU, and the embedded Triton is for x86-64 alone: serve in the container.{dot}"
        )
    if units := [name for name in ("VNNI", "AMX") if name in features]:
        return Advice(CPU_INT8, f"No GPU, and a CPU whose {' and '.join(units)} adds INT8 products exactly.")
    if facts.processor.features is None:
        return Advice(CPU, "No GPU, and a CPU of unknown features: FP32 is right on any.")
    return Advice(CPU, "No GPU, and a CPU without VNNI, where sums of u8 x s8 products saturate on AVX2.")
