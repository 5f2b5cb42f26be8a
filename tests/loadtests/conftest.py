"""Folders of runs that never took place: what a load test writes, with the faults that a test plants."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_loadtests.run_folder import RunFolder, RunInfo, Stage
from cosytriton_loadtests.samples import Chunk, Sample, write_samples
from cosytriton_loadtests.server_watch import Look, Process

START = 1_000_000.0
CHUNK_SECONDS = 0.5


@dataclass(frozen=True)
class Imagined:
    """What happens in the run. Times in seconds, memory in MB."""

    seconds: float = 60.0
    rate: float = 4.0
    warm_up: float = 6.0
    wait: float = 0.2  # median until the first audio
    scenarios: tuple[str, ...] = ("long", "short")
    compute: dict[str, float] = field(default_factory=lambda: {"flow": 0.05, "vocoder": 0.02})
    queue: dict[str, float] = field(default_factory=dict)
    grows: dict[str, float] = field(default_factory=dict)  # process -> MB a minute
    metrics: bool = True
    seed: int = 0
    change: Callable[[int, Sample], Sample] = lambda _, sample: sample


def samples_of(run: Imagined) -> Iterator[Sample]:
    rng = np.random.default_rng(run.seed)
    for number in range(int(run.seconds * run.rate)):
        due = START + number / run.rate
        wait = run.wait * rng.lognormal(0, 0.2)
        chunks = tuple(Chunk(due + wait + 0.4 * i, CHUNK_SECONDS, 0.01) for i in range(3))
        scenario = run.scenarios[number % len(run.scenarios)]
        sample = Sample(scenario, "steady", "grpc-stream", {}, due, due, chunks[-1].at, chunks, 40, "ab")
        yield run.change(number, sample)


def looks_of(run: Imagined) -> Iterator[Look]:
    for second in range(int(run.seconds) + 1):
        done = second * run.rate
        counts = dict.fromkeys(run.compute, done)
        metrics = {
            "nv_inference_count": counts,
            "nv_inference_exec_count": {model: count / 2 for model, count in counts.items()},
            "nv_inference_compute_infer_duration_us": {m: done * s * 1e6 for m, s in run.compute.items()},
            "nv_inference_queue_duration_us": {m: done * run.queue.get(m, 0.001) * 1e6 for m in run.compute},
            "nv_inference_pending_request_count": dict.fromkeys(run.compute, 1.0),
            "cosytriton_speech_lm_active": {"speech_lm": 2.0},
        }
        processes = tuple(
            Process(name, pid, int(1e6 * (200 + run.grows.get(name, 0) * second / 60)), second * 0.1)
            for pid, name in enumerate(("tritonserver", "tts_stream"), 1)
        )
        problem = "" if run.metrics else "nobody answers"
        yield Look(START + second, metrics if run.metrics else {}, processes, 1 << 20, problem)


@pytest.fixture
def imagine(tmp_path: Path) -> Callable[..., RunFolder]:
    """Write the folder of a run: `imagine("name", rate=3, ...)`, with the fields of `Imagined`."""

    def write(name: str = "run", **fields: object) -> RunFolder:
        run = replace(Imagined(), **fields)  # type: ignore[arg-type]
        folder = RunFolder(tmp_path / name)
        stages = (Stage("steady", START, run.seconds, 4, run.rate),)
        folder.write_info(RunInfo("localhost:8001", "http://localhost:8002", "open", run.warm_up, stages))
        write_samples(folder.samples_file, samples_of(run))
        folder.server_file.write_text("".join(f"{look.line()}\n" for look in looks_of(run)))
        return folder

    return write


@pytest.fixture(scope="session")
def proxies() -> Any:
    """The module `proxy.py`."""
    path = Path(__file__).with_name("proxy.py")
    spec = importlib.util.spec_from_file_location("proxy", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class FakeTriton:
    """A running `fake_triton.py`."""

    folder: Path
    url: str
    http_url: str

    def served(self) -> list[dict[str, float]]:
        """Times of each request by the server's clock."""
        return [json.loads(line) for line in (self.folder / "served.jsonl").read_text().splitlines()]


@pytest.fixture
def fake_triton(tmp_path: Path) -> Iterator[Callable[..., FakeTriton]]:
    """Start one: `fake_triton("--service=0.05", "--slots=1")`."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> FakeTriton:
        folder = tmp_path / f"fake-{len(processes)}"
        folder.mkdir()
        program = Path(__file__).with_name("fake_triton.py")
        processes.append(subprocess.Popen([sys.executable, str(program), str(folder), *options]))
        while not (folder / "addresses.json").exists():
            assert processes[-1].poll() is None
            time.sleep(0.05)
        return FakeTriton(folder, **json.loads((folder / "addresses.json").read_text()))

    yield start
    for process in processes:
        process.kill()
        process.wait()
