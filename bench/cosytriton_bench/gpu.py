"""The same roofline for GPUs: computed from the counts and published peak rates, measured nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosytriton_bench.peaks import Peaks
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.profiles import CPU, CPU_INT8

# Tensor cores without sparsity, operations a second / 2, and memory bandwidth, as NVIDIA's data sheets say.
GPUS = (
    Peaks("T4", 65e12 / 2, 130e12 / 2, 320e9),
    Peaks("L20", 119.5e12 / 2, 239e12 / 2, 864e9),
    Peaks("H100 SXM", 989.4e12 / 2, 1978.9e12 / 2, 3.35e12),
)
PRECISIONS = {CPU.name: "FP16", CPU_INT8.name: "INT8"}  # what stands for a profile's counts
_FP16_BYTES = 2

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a GPU could do at most.

    Attributes:
        gpu, precision: which.
        step, prefill, flow, vocoder: least seconds of one request's stages; `step` is of one token.
        first_audio: of a stream: prompt, the tokens of the first chunk, its flow and its vocoder.
        streams: seconds of speech in a second, eight requests sharing each step.

    """

    gpu: str
    precision: str
    step: float
    prefill: float
    flow: float
    vocoder: float
    first_audio: float
    streams: float


def expected(rows: Rows, work: Workload, gpus: Sequence[Peaks] = GPUS) -> Iterator[Expected]:
    """A row for each GPU and precision whose counts are there."""
    for gpu in gpus:
        for profile, precision in PRECISIONS.items():
            least = {row["case"]: _seconds(row, gpu) for row in rows if row["profile"] == profile}
            if least.keys() >= {"lm_prefill", "lm_decode_b1", "lm_decode_b8", "flow", "vocoder"}:
                yield _expected(gpu.name, precision, least, work)


def _seconds(row: Mapping[str, Any], gpu: Peaks) -> float:
    """INT8 weights are bytes; everything else is half precision there."""
    width = 1 if row["int8"] else _FP16_BYTES
    return gpu.seconds(row["fp32"], row["int8"], row["weights"] * width)


def _expected(gpu: str, precision: str, least: Mapping[str, float], work: Workload) -> Expected:
    family, frames = work.family, work.family.frames
    hop = family.hop_tokens + -work.prompt_tokens % family.hop_tokens
    heard = frames(work.prompt_tokens + hop) / frames(work.prompt_tokens + work.tokens)  # share of its flow
    spoken = hop / work.tokens
    first = (
        least["lm_prefill"]
        + (hop + family.lookahead) * least["lm_decode_b1"]
        + heard * least["flow"]
        + spoken * least["vocoder"]
    )
    whole = least["lm_prefill"] + work.tokens * least["lm_decode_b8"] / 8 + least["flow"] + least["vocoder"]
    return Expected(
        gpu,
        precision,
        least["lm_decode_b1"],
        least["lm_prefill"],
        least["flow"],
        least["vocoder"],
        first,
        work.speech_seconds / whole,
    )
