"""What the engine of each model is built from: a graph as TensorRT takes it, and its profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cosytriton_engines.engine import language_model
from cosytriton_engines.engine.builder import EngineError
from cosytriton_engines.engine.shapes import Shapes, split
from cosytriton_ensemble.pipeline import Pipeline

TEXT_ENCODER = "text_encoder"


@dataclass(frozen=True, slots=True)
class Source:
    """A graph, and the shapes that its engine is built for."""

    graph: Path
    profiles: tuple[Shapes, ...]


def source_of(model: str, graph: Path, pipeline: Pipeline, folder: Path) -> Source:
    """What to build an engine from.

    Args:
        model: name of a native stage, `speech_lm` or `text_encoder`.
        graph: its graph in any precision.
        pipeline: of its family.
        folder: for a copy of the graph, where TensorRT needs another one. It must last as long as the build.

    Raises:
        EngineError: there is no such model, or the graph is not one of it.

    """
    stages = {stage.name: stage for stage in pipeline.native_stages}
    if model in stages:
        return Source(graph, split(stages[model], pipeline))
    if model == TEXT_ENCODER:
        return Source(graph, (language_model.text_encoder_profile(graph),))
    if model == pipeline.speech_lm.name:
        fixed = folder / graph.name
        language_model.fix_capacity(graph, fixed, pipeline.longest_sequence)
        return Source(fixed, language_model.profiles(fixed, pipeline))
    known = [*stages, pipeline.speech_lm.name, TEXT_ENCODER]
    raise EngineError(f"There is no graph of a model {model!r}; known are {', '.join(known)}.")
