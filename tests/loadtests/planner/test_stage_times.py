"""Stage times: their file, and those that a benchmark's results hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.stage_times import Cost, StageTimes, from_bench


def test_what_is_written_is_read(small: StageTimes, tmp_path: Path) -> None:
    times = replace(small, slowdown=1.2, latency=0.01, slots=4)
    times.write(tmp_path / "times.json")
    assert StageTimes.read(tmp_path / "times.json") == times


@pytest.mark.parametrize(
    "break_it",
    [
        lambda content: content.pop("flow"),
        lambda content: content.update(format=2),
        lambda content: content.update(family="cosyvoice9"),
        lambda content: content.update(more=1),
        lambda content: content["step"].update(tokens=1),
    ],
)
def test_another_file_is_refused(
    small: StageTimes, break_it: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    small.write(path)
    content = json.loads(path.read_text())
    break_it(content)
    path.write_text(json.dumps(content))
    with pytest.raises(LoadTestError, match="no stage times"):
        StageTimes.read(path)


def bench(path: Path, **walls: float) -> Path:
    """Results of a benchmark on two cores in which every stage keeps 1.5 of them busy."""
    figures = {f"{name}/cpu": wall for name, wall in walls.items()}
    figures |= {f"{name}:cpu/cpu": 1.5 * wall for name, wall in walls.items()}
    settings = {"family": "cosyvoice2", "prompt_seconds": 3, "speech_seconds": 5, "prompt_positions": 100}
    content = {
        "machine": {"cores": 2},
        "settings": settings,
        "figures": {name: {"unit": "s", "median": wall} for name, wall in figures.items()},
    }
    path.write_text(json.dumps(content))
    return path


STAGES = {"lm_prefill": 0.2, "lm_decode_b1": 0.012, "lm_decode_b4": 0.018, "lm_decode_b16": 0.042}
NATIVE = {"flow_short_b1": 0.16, "flow": 0.5, "vocoder_short_b1": 0.05, "vocoder": 0.27}


def test_a_benchmark_gives_costs_in_core_seconds(tmp_path: Path) -> None:
    times = from_bench(bench(tmp_path / "results.json", **STAGES, **NATIVE), "cpu")
    # A step: 10 ms and 2 ms a row, of 1.5 cores.
    assert (times.step.call, times.step.token) == pytest.approx((0.015, 0.003))
    assert times.step.width == pytest.approx(1.5)
    assert times.prefill.work(100) == pytest.approx(0.3)
    # The flow: 30 tokens (0.6 s of reference and of speech) and 200 (3 and 5 s).
    assert (times.flow.call, times.flow.token) == pytest.approx((0.15, 0.003))
    # The vocoder: 15 and 125.
    assert (times.vocoder.call, times.vocoder.token) == pytest.approx((0.03, 0.003))
    assert (times.cores, times.prompt_tokens, times.family) == (2, 75, "cosyvoice2")


def test_a_cost_is_never_negative(tmp_path: Path) -> None:
    odd = NATIVE | {"flow_short_b1": 0.02, "vocoder": 0.04}
    times = from_bench(bench(tmp_path / "results.json", **STAGES, **odd), "cpu")
    assert times.flow.call == 0 < times.flow.token
    assert times.vocoder.token == 0 < times.vocoder.call
    assert times.vocoder.width == Cost(width=1.5).width


def test_a_benchmark_of_another_profile_is_refused(tmp_path: Path) -> None:
    path = bench(tmp_path / "results.json", **STAGES, **NATIVE)
    with pytest.raises(LoadTestError, match="cpu_int8"):
        from_bench(path, "cpu_int8")
    with pytest.raises(LoadTestError, match="no results"):
        from_bench(tmp_path / "missing.json", "cpu")
