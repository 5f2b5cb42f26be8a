"""The language model's graph as TensorRT takes it: a key-value cache of one fixed length.

The exported graph leaves the length open, so that ONNX Runtime can let a cache grow. TensorRT builds a
cache update only over a known length: it gets a copy of the graph with room for the longest request.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from cosytriton_engines.gate import GateError
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Dim, Size


def fix_capacity(source: Path, target: Path, capacity: int) -> None:
    """Write a copy of the language model's graph whose caches have `capacity` positions.

    The weights go to `<target>.data`: those of a full-size model are too large for the graph's own file.
    """
    model, data = onnx.load(source), target.with_name(f"{target.name}.data")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity
    del model.graph.value_info[:]  # it would contradict; the parser infers it again
    data.unlink(missing_ok=True)  # onnx would append
    onnx.save(model, target, save_as_external_data=True, location=data.name)


def profile(onnx_path: Path, pipeline: Pipeline) -> dict[str, dict[Size, tuple[int, ...]]]:
    """The optimization profile of a graph that `fix_capacity` wrote: input name -> (min, opt, max) shapes.

    Raises `GateError` when an axis is neither fixed nor the batch nor the new positions.
    """
    slots = int(dict(pipeline.speech_lm.parameters)["slots"])
    batch = Dim("batch", 1, max(1, slots // 2), slots)
    new = Dim("new", 1, 1, pipeline.longest_prompt)  # once the prompt, then a step of one id
    ranges = {dim.name: dim for dim in (batch, new)}
    shapes: dict[str, dict[Size, tuple[int, ...]]] = {}
    for value in onnx.load(onnx_path, load_external_data=False).graph.input:
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if unknown := [dim for dim in dims if isinstance(dim, str) and dim not in ranges]:
            raise GateError(
                f"{onnx_path}: the input {value.name!r} is dynamic along {unknown}, a language model may be "
                f"along {sorted(ranges)}; write the graph with `fix_capacity` first."
            )
        sizes: tuple[Size, ...] = ("min", "opt", "max")
        shapes[value.name] = {
            size: tuple(ranges[dim].size(size) if isinstance(dim, str) else dim for dim in dims)
            for size in sizes
        }
    return shapes
