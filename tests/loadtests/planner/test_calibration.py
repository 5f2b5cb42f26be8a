"""Stage times from a run: a run that was simulated gives back the times that it was simulated with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosytriton_ensemble.metrics import LM_STEP_ROWS, LM_STEPS, SLOTS
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.calibration import explain, from_run, mix_of, slowed
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.simulation import simulate
from cosytriton_loadtests.planner.stage_times import PAST, Cost, StageTimes
from cosytriton_loadtests.run_folder import RunFolder, RunInfo, Stage
from cosytriton_loadtests.samples import Sample, write_samples
from cosytriton_loadtests.server_watch import Look, Process

MIX = [
    Speech("short", "grpc-stream", (20,), 0.05),
    Speech("usual", "grpc-stream", (90,), 0.05),
    Speech("long", "grpc-stream", (300,), 0.05),
    Speech("whole", "grpc", (60,)),
]
PROCESSES = ("text_frontend", "tritonserver", "speech_lm", "tts_stream", "flow", "vocoder")
IDLE = 0.02  # cores that a process takes while nothing is asked
SECONDS = 90
RATE = 1.5


def spent(times: StageTimes, samples: list[Sample], until: float) -> dict[str, float]:
    """Core seconds of each process until a time, counted anew from what was heard."""
    work = dict.fromkeys(PROCESSES, 0.0)
    for sample in samples:
        if sample.sent <= until:
            work["text_frontend"] += times.request.call
            work["speech_lm"] += times.prefill.work(times.prompt_positions)
        said = float(times.prompt_tokens)
        for chunk in sample.chunks:
            tokens = 25 * chunk.seconds
            if chunk.at <= until:
                work["speech_lm"] += times.step.work(1) * tokens
                work["tritonserver"] += times.chunk.call
                work["vocoder"] += times.vocoder.work(tokens)
                if len(sample.chunks) > 1:
                    work["tts_stream"] += times.flow_stream.work(tokens + PAST * said)
                else:
                    work["flow"] += times.flow.work(said + tokens)
            said += tokens
    return work


def folder_of(times: StageTimes, path: Path, *, seconds: float = SECONDS, idle: float = IDLE) -> RunFolder:
    """The folder of a run as it would have been on this server."""
    folder = RunFolder(path)
    samples = list(simulate(times, MIX, RATE, requests=int(RATE * seconds)).samples)
    folder.write_info(RunInfo("localhost:8001", "", "open", 5.0, (Stage("steady", 0.0, seconds, 1, RATE),)))
    write_samples(folder.samples_file, samples)
    looks = [look(times, samples, float(at), idle) for at in np.arange(0.0, samples[-1].ended + 2, 1.0)]
    folder.server_file.write_text("".join(f"{one.line()}\n" for one in looks))
    return folder


def look(times: StageTimes, samples: list[Sample], at: float, idle: float) -> Look:
    work = {name: seconds + idle * at for name, seconds in spent(times, samples, at).items()}
    steps = sum(25 * chunk.seconds for sample in samples for chunk in sample.chunks if chunk.at <= at)
    metrics = {
        LM_STEPS: {"speech_lm": steps},
        LM_STEP_ROWS: {"speech_lm": steps},
        SLOTS: {"speech_lm": 4.0},
        "nv_inference_compute_infer_duration_us": {"vocoder": 1e6 * work["vocoder"] / times.vocoder.width},
    }
    processes = tuple(
        Process(name, number, 0, seconds) for number, (name, seconds) in enumerate(work.items())
    )
    return Look(at, metrics, processes)


def test_a_simulated_run_gives_back_its_costs(small: StageTimes, tmp_path: Path) -> None:
    found = from_run(folder_of(small, tmp_path), cores=2)
    for stage, size in (("vocoder", 50), ("request", 0), ("chunk", 0)):
        assert getattr(found, stage).work(size) == pytest.approx(getattr(small, stage).work(size), rel=0.1), (
            stage
        )
    # Whole hops of the prompt, which are the same for all, belong to the call.
    assert found.flow.work(60) == pytest.approx(small.flow.work(60 + 82), rel=0.1)
    assert found.flow_stream.work(50) == pytest.approx(small.flow_stream.work(50 + PAST * 75), rel=0.1)
    assert found.step.work(1) == pytest.approx(small.step.work(1), rel=0.1)
    assert found.cores == pytest.approx(2 - 6 * IDLE, abs=0.03)
    assert found.slots == 4
    assert found.prompt_tokens == 82 % 25
    assert found.vocoder.width == pytest.approx(1.2, abs=0.1)


def test_more_core_seconds_for_the_same_requests_are_the_slowdown(small: StageTimes, tmp_path: Path) -> None:
    slowdown = 1.3
    dear = replace(
        small,
        step=times(small.step, slowdown),
        flow=times(small.flow, slowdown),
        flow_stream=times(small.flow_stream, slowdown),
        vocoder=times(small.vocoder, slowdown),
    )
    calm = from_run(folder_of(small, tmp_path / "calm"), cores=2)
    found = slowed(calm, folder_of(dear, tmp_path / "busy", idle=0.0))
    assert found.slowdown == pytest.approx(slowdown, rel=0.08)


def times(cost: Cost, factor: float) -> Cost:
    return Cost(cost.call * factor, cost.token * factor, cost.width)


def test_its_simulation_gives_the_same_first_audio(small: StageTimes, tmp_path: Path) -> None:
    folder = folder_of(replace(small, latency=0.02), tmp_path)
    found, mix = from_run(folder, cores=2), mix_of(list(folder.samples()))
    waits = [
        np.percentile([sample.first_audio or 0.0 for sample in samples], [50, 95])
        for samples in (folder.samples(), simulate(found, mix, RATE, requests=180).samples)
    ]
    assert waits[1] == pytest.approx(waits[0], rel=0.2)


def test_the_mix_is_what_was_spoken() -> None:
    chunks = simulate_one(1000)
    speeches = mix_of([chunks, replace(chunks, tokens=0), replace(chunks, chunks=())])
    assert [(speech.pieces, speech.audible) for speech in speeches] == [((1000,), 0.05)]
    assert mix_of([simulate_one(1200)])[0].pieces == (600, 600)
    assert mix_of([]) == []


def test_shares_of_scenarios_replace_those_of_a_short_run() -> None:
    samples = [simulate_one(100), simulate_one(200), replace(simulate_one(50), scenario="short")]
    assert [speech.weight for speech in mix_of(samples)] == [1, 1, 1]
    assert [speech.weight for speech in mix_of(samples, {"long": 1, "short": 3})] == [0.5, 0.5, 3]


def simulate_one(tokens: int) -> Sample:
    from cosytriton_loadtests.samples import Chunk

    chunk = Chunk(1.0, tokens / 25, 0.05)
    return Sample("long", "steady", "grpc-stream", {}, 0.0, 0.0, 1.0, (chunk,), tokens)


def test_costs_that_explain_are_found_and_none_is_negative() -> None:
    rng = np.random.default_rng(2)
    counts = rng.poisson(4, (40, 3)).astype(float)
    assert explain(counts, counts @ [0.3, 0.0, 0.05]) == pytest.approx([0.3, 0.0, 0.05], abs=1e-6)
    found = explain(counts, counts @ [0.3, -0.1, 0.05])
    assert found[1] == 0
    counts[:, 1] = 0
    assert explain(counts, counts @ [0.3, 0, 0.05]) == pytest.approx([0.3, 0, 0.05], abs=1e-6)


def test_a_run_without_a_watched_server_is_refused(small: StageTimes, tmp_path: Path) -> None:
    folder = folder_of(small, tmp_path)
    folder.server_file.unlink()
    with pytest.raises(LoadTestError, match="another machine"):
        from_run(folder)


def test_a_run_that_is_too_short_is_refused(small: StageTimes, tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="18 s or more"):
        from_run(folder_of(small, tmp_path, seconds=15))
