"""Input files for Triton's perf_analyzer: each native stage alone, with the shapes of its declaration.

The figures say what a stage could carry by itself. What a listener waits for is in the load test.
"""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.repository import family_of
from cosytriton_ensemble.spec import Array, Size, Stage
from cosytriton_loadtests.errors import LoadTestError

SCRIPT = "perf_analyzer.sh"
FEEDS = 16  # different requests of a file, which perf_analyzer sends in turn
CONCURRENCY = "1:4"  # requests in flight
REQUESTS = "50"  # of one measurement


@dataclass(frozen=True, slots=True)
class StageInput:
    """The requests of one stage: the file, and the command line that sends them."""

    stage: Stage
    file: Path
    command: str


def write_inputs(
    repository: Path, folder: Path, url: str = "localhost:8001", size: Size = "opt", feeds: int = FEEDS
) -> list[StageInput]:
    """Write a JSON file for each native stage, and a shell script with all command lines.

    Args:
        repository: the model repository, which says what family is served.
        folder: where the files are written; made if it is not there.
        url: the server's address for gRPC.
        size: smallest, usual or largest extents of the declaration.
        feeds: different requests in each file.

    Raises:
        LoadTestError: a number is not allowed.
        RepositoryError: this is no repository.
    """
    if feeds < 1:
        raise LoadTestError(f"feeds = {feeds}: allowed is 1 or more.")
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        _write(stage, folder, url, size, feeds) for stage in pipeline_of(family_of(repository)).native_stages
    ]
    lines = [f"{_remark(one.stage, feeds)}{one.command}\n" for one in written]
    (folder / SCRIPT).write_text('#!/bin/sh\ncd "$(dirname "$0")"\n' + "".join(lines), encoding="utf-8")
    return written


def _write(stage: Stage, folder: Path, url: str, size: Size, feeds: int) -> StageInput:
    data = [
        {name: _tensor(array[0]) for name, array in stage.sample(size, seed=seed).items()}
        for seed in range(feeds)
    ]
    file = folder / f"{stage.name}.json"
    file.write_text(json.dumps({"data": data}) + "\n", encoding="utf-8")
    command = [
        *("perf_analyzer", "-m", stage.name, "-u", url, "-i", "grpc", "-b", "1"),
        *("--input-data", file.name, "--concurrency-range", CONCURRENCY, "--percentile", "95"),
        # Not windows of time, the default: one request of a large stage may take longer than such a window.
        *("--measurement-mode", "count_windows", "--measurement-request-count", REQUESTS),
    ]
    return StageInput(stage, file, shlex.join(command))


def _tensor(array: Array) -> dict[str, Any]:
    """One input of one request, without its batch dimension: raw little-endian bytes and the shape."""
    return {"content": {"b64": base64.b64encode(array.tobytes()).decode()}, "shape": array.shape}


def read_feed(stage: Stage, request: dict[str, Any]) -> dict[str, Array]:
    """What perf_analyzer sends for one entry of `data`: input name -> array [1, ...]."""
    return {
        tensor.name: np.frombuffer(
            base64.b64decode(request[tensor.name]["content"]["b64"]), tensor.numpy_type
        ).reshape(1, *request[tensor.name]["shape"])
        for tensor in stage.inputs
    }


def _remark(stage: Stage, feeds: int) -> str:
    if not stage.cached:
        return ""
    return (
        f"# After its first {feeds} requests, {stage.name} answers from the response cache; to measure the\n"
        "# graph, serve with `response_cache { enable: false }` in its configuration.\n"
    )
