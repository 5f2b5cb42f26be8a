"""What is computed for GPUs, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosytriton_bench.gpu import expected
from cosytriton_bench.peaks import Peaks
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.families import COSYVOICE2

GPU = Peaks("a GPU", fp=1e12, int8=2e12, bandwidth=1e11)
WORK = Workload(COSYVOICE2, prompt_seconds=3, speech_seconds=5)


def row(
    case: str, profile: str = "cpu", fp32: float = 0, int8: float = 0, weights: float = 0
) -> dict[str, object]:
    return {"case": case, "profile": profile, "fp32": fp32, "int8": int8, "weights": weights}


ROWS = [
    row("lm_prefill", fp32=4e10, weights=5e8),  # 40 ms of products, 10 ms of weights
    row("lm_decode_b1", fp32=4e8, weights=5e8),  # 10 ms of weights
    row("lm_decode_b8", fp32=32e8, weights=5e8),
    row("flow", fp32=8e11, weights=7e7),  # 800 ms
    row("vocoder", fp32=1e11),  # 100 ms
]


def test_the_longer_of_products_and_weights_is_the_limit() -> None:
    (one,) = expected(ROWS, WORK, [GPU])
    assert (one.gpu, one.precision) == ("a GPU", "FP16")
    assert (one.prefill, one.step, one.flow, one.vocoder) == pytest.approx((0.040, 0.010, 0.8, 0.1))


def test_first_audio_takes_the_first_chunk_and_its_lookahead() -> None:
    (one,) = expected(ROWS, WORK, [GPU])
    # 28 tokens; 75 + 25 of the flow's 75 + 125 tokens; 25 of the vocoder's 125.
    assert one.first_audio == pytest.approx(0.040 + 28 * 0.010 + 0.8 * 100 / 200 + 0.1 * 25 / 125)


def test_eight_requests_share_each_step() -> None:
    (one,) = expected(ROWS, WORK, [GPU])
    assert one.streams == pytest.approx(5 / (0.040 + 125 * 0.010 / 8 + 0.8 + 0.1))


def test_int8_weights_are_bytes() -> None:
    rows = [{**one, "profile": "cpu_int8", "int8": one["fp32"], "fp32": 0} for one in ROWS]
    (one,) = expected(rows, WORK, [GPU])
    assert one.precision == "INT8"
    assert (one.step, one.flow) == pytest.approx((0.005, 0.4))


def test_without_every_stage_nothing_is_said() -> None:
    assert not list(expected(ROWS[1:], WORK, [GPU]))


def test_the_documents_figures_follow_from_its_counts() -> None:
    text = (Path(__file__).parents[2] / "bench" / "GPU.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    profiles = {"FP16": "cpu", "INT8": "cpu_int8"}
    counts = [
        {
            "case": case,
            "profile": profiles[graph],
            "fp32": float(fp) * 1e9,
            "int8": float(int8) * 1e9,
            "weights": float(weights) * 1e6,
        }
        for case, graph, fp, int8, weights in (line for line in cells if len(line) == 5)
        if graph in profiles
    ]
    assert len(counts) == 10
    written = [line for line in cells if len(line) == 8 and line[1] in profiles]
    computed = list(expected(counts, WORK))
    assert [(line[0], line[1]) for line in written] == [(one.gpu, one.precision) for one in computed]
    for line, one in zip(written, computed, strict=True):
        seconds = (one.prefill, one.step, one.flow, one.vocoder, one.first_audio)
        assert [float(number) for number in line[2:7]] == pytest.approx([1e3 * s for s in seconds], rel=0.05)
        assert float(line[7]) == pytest.approx(one.streams, rel=0.05)
