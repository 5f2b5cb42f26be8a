"""The language model's graph as TensorRT takes it: a key-value cache of one fixed length.

The exported graph leaves the length open, so that ONNX Runtime can let a cache grow. TensorRT builds a
cache update only over a known length: it gets a copy of the graph with room for the longest request.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx

from cosytriton_engines.engine.builder import EngineError
from cosytriton_engines.engine.shapes import SIZES, Shapes
from cosytriton_ensemble.pipeline import TEXT, Pipeline
from cosytriton_ensemble.spec import Dim, Size

CAPACITY = "capacity"  # the axis of a cache's positions


def fix_capacity(source: Path, target: Path, capacity: int) -> None:
    """Write a copy of the language model's graph whose caches, of any type, have `capacity` positions.

    The weights go to `<target>.data`: those of a full-size model are too large for the graph's own file.
    """
    model, data = onnx.load(source), target.with_name(f"{target.name}.data")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == CAPACITY:
                dim.dim_value = capacity
    del model.graph.value_info[:]  # it would contradict; the parser infers it again
    data.unlink(missing_ok=True)  # onnx would append
    onnx.save(model, target, save_as_external_data=True, location=data.name)


def profiles(graph: Path, pipeline: Pipeline) -> tuple[Shapes, Shapes]:
    """The optimization profiles of a graph that `fix_capacity` wrote: of a step, and of a prompt.

    A step feeds one id to each row in use, a prompt many ids to one row. One profile for both would be tuned
    for one of them alone, and hold scratch memory for as many prompts at once as there are rows.

    Raises `EngineError` when an axis is neither fixed nor the batch nor the new positions.
    """
    slots = int(dict(pipeline.speech_lm.parameters)["slots"])
    usual = TEXT.opt + pipeline.prompt_tokens.opt
    step = (Dim("batch", 1, max(1, slots // 2), slots), Dim("new", 1, 1, 1))
    prompt = (Dim("batch", 1, 1, 1), Dim("new", 1, usual, pipeline.longest_prompt))
    return _shapes(graph, step), _shapes(graph, prompt)


def text_encoder_profile(graph: Path) -> Shapes:
    """The optimization profile of CosyVoice 1's text encoder, which embeds the text of one request."""
    return _shapes(graph, (Dim("batch", 1, 1, 1), Dim("new", TEXT.min, TEXT.opt, TEXT.max)))


def _shapes(graph: Path, dims: Iterable[Dim]) -> Shapes:
    ranges = {dim.name: dim for dim in dims}
    shapes: dict[str, dict[Size, tuple[int, ...]]] = {}
    for value in onnx.load(graph, load_external_data=False).graph.input:
        axes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if unknown := [axis for axis in axes if isinstance(axis, str) and axis not in ranges]:
            raise EngineError(
                f"{graph}: the input {value.name!r} is dynamic along {unknown}, a language model may be "
                f"along {sorted(ranges)}; write the graph with `fix_capacity` first."
            )
        shapes[value.name] = {
            size: tuple(ranges[axis].size(size) if isinstance(axis, str) else axis for axis in axes)
            for size in SIZES
        }
    return shapes
