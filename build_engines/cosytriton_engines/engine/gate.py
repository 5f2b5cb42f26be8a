"""Whether TensorRT takes a graph, asked on a machine without a GPU.

TensorRT for RTX is a sibling of TensorRT with the same parser and the same strong typing; it builds
plans on the CPU alone. Its plans are thrown away: this is a gate for the graphs, never the engine that is
served. It is not a dependency; install it where the gate is wanted.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from cosytriton_engines.engine.builder import BuildResult, EngineError, build, imported
from cosytriton_engines.engine.shapes import Shapes
from cosytriton_engines.engine.sources import TEXT_ENCODER, source_of
from cosytriton_ensemble.manifest import how_to_make
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.profiles import GPU_FP16, GPU_INT8, text_encoder_of
from cosytriton_ensemble.repository import family_of, version_directory

MODULE = "tensorrt_rtx"
REQUIREMENT = "tensorrt-rtx-cu12==1.7.1.116"
TARGET = "SM80"  # the oldest data-centre architecture among those that it builds for without a GPU


def build_gate(graph: Path, profiles: Sequence[Shapes]) -> BuildResult:
    """Parse the graph strongly typed and build an engine for `profiles`, which is thrown away.

    Raises `EngineError` when TensorRT for RTX is not installed, when the parser refuses a node, when a
    profile does not fit the graph's inputs, or when no engine can be built.
    """
    trt = imported(MODULE, f"Run `pip install {REQUIREMENT}` (no GPU needed).")

    def without_gpu(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, TARGET), 0)

    return build(graph, profiles, trt=trt, adapt=without_gpu)[1]


def measured(graph: Path, profiles: Sequence[Shapes]) -> BuildResult:
    """`build_gate` in a process of its own, whose peak memory is that of this build alone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(build_gate, graph, profiles).result()
        except BrokenProcessPool as error:
            raise EngineError(
                f"{graph}: the process that built it died; the system may have run out of memory."
            ) from error


def gate_repository(
    repository: Path, models: Sequence[str] | None = None
) -> Iterator[tuple[str, str, BuildResult | EngineError]]:
    """Ask about every graph that a profile for GPUs is built from: model, file, and what the build took.

    Raises `RepositoryError` when the repository has no checkpoint, `EngineError` for an unknown model.
    """
    pipeline = pipeline_of(family_of(repository))
    stages = {stage.name: stage for stage in pipeline.graph_stages if stage.planned}
    if unknown := sorted(set(models or ()) - stages.keys()):
        raise EngineError(f"There are no graphs of {', '.join(unknown)}; known are {', '.join(stages)}.")
    for name in models or stages:
        files = dict.fromkeys(profile.graph_of(stages[name]) for profile in (GPU_FP16, GPU_INT8))
        for file in files:
            for model, graph in _graphs(name, version_directory(repository, name) / file):
                yield model, graph.name, _answer(model, graph, pipeline)


def _graphs(name: str, graph: Path) -> list[tuple[str, Path]]:
    encoder = graph.with_name(text_encoder_of(graph.name))
    return [(name, graph), *([(TEXT_ENCODER, encoder)] if encoder.is_file() else [])]


def _answer(model: str, graph: Path, pipeline: Pipeline) -> BuildResult | EngineError:
    if not graph.is_file():
        return EngineError(f"{graph.name} is missing. {how_to_make(graph)} Without a GPU add --graphs.")
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = source_of(model, graph, pipeline, Path(folder))
            return measured(source.graph, source.profiles)
        except EngineError as error:
            return error
