"""The language model's engine: its key-value caches stay on the GPU from step to step.

A cache has a row for each request that is spoken, of the capacity that the engine was built for. An update is
in place: TensorRT's cache update (10.15 and newer) wants an updated cache at the address of the cache.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from cosytriton_engines.engine.builder import EngineError, tensorrt
from cosytriton_engines.engine.device import Address, Closing, Device, cuda_runtime
from cosytriton_engines.engine.plan import Binding, OpenPlan, PlanRunner
from cosytriton_ensemble.language_model import LanguageModel, TextEncoder
from cosytriton_ensemble.llm_spec import METADATA_KEY, LanguageModelSpec, TokenIds
from cosytriton_ensemble.manifest import Manifest, how_to_make
from cosytriton_ensemble.profiles import FP32_GRAPH, text_encoder_of
from cosytriton_ensemble.sampling import FloatArray
from cosytriton_ensemble.spec import Array, Feed

LOGITS = "logits"


class LanguageModelPlan(Closing):
    """Runs rows of the language model and keeps their caches. Not thread-safe.

    Attributes:
        spec: what the graph says about itself.
        width: of an embedding, None where the model takes ids alone.
        rows: that can be decoded at once.
        capacity: positions of a row.

    Args:
        plan: built for the profiles of `language_model.profiles`.
        graph: the ONNX file that the plan was built from; only its description is read.
        trt: the module `tensorrt`.
        cuda: the module `cuda.bindings.runtime`.
        version_compatible: see `OpenPlan`.

    Raises:
        EngineError: the plan cannot be opened, is none of a language model, or CUDA refuses.

    """

    def __init__(
        self, plan: Path, graph: Path, *, trt: Any, cuda: Any, version_compatible: bool = False
    ) -> None:
        self.spec = _spec_of(graph)
        self._plan = OpenPlan(plan, trt=trt, version_compatible=version_compatible)
        inputs = self._plan.inputs
        caches = [name for name in inputs if "_cache." in name]
        aliases = {binding.alias for binding in self._plan.outputs.values()}
        if not caches or LOGITS not in self._plan.outputs or not aliases.issuperset(caches):
            raise EngineError(
                f"{plan} is no language model that updates its caches in place. Build it with TensorRT 10.15 "
                "or newer."
            )
        self.rows = max(largest[0] for _, _, largest in inputs[caches[0]].ranges)
        self.capacity = inputs[caches[0]].ranges[0][2][2]
        self.width = inputs["embeddings"].ranges[0][2][2] if "embeddings" in inputs else None
        self._device = Device(cuda)
        # Scratch memory for a prompt and for a step, and a row of every cache: all is taken at the start.
        self._strides = {name: _size((1, *inputs[name].ranges[0][2][1:]), inputs[name]) for name in caches}
        self._caches = {name: self._device.allocate(self.rows * self._strides[name]) for name in caches}
        self._fed = {
            name: self._device.allocate(max(_size(largest, binding) for _, _, largest in binding.ranges))
            for name, binding in inputs.items()
            if name not in caches
        }
        logits = self._plan.outputs[LOGITS]
        self._logits = np.zeros((self.rows, self.spec.speech_rows), logits.dtype)
        self._logits_address = self._device.allocate(self._logits.nbytes)
        self._bound: dict[int, tuple[slice, int]] = {}  # profile -> rows and new positions set last

    def fit(self, positions: int, rows: int) -> None:
        """Make sure that `rows` of `positions` have room: the cache does not grow."""
        if positions > self.capacity or rows > self.rows:
            raise EngineError(
                f"{self._plan.path} holds {self.rows} rows of {self.capacity} positions, not {rows} of "
                f"{positions}. Build it for more."
            )

    def clear(self, row: int) -> None:
        """Zero a row. Positions behind a row's end are masked, but a masked NaN would still spread."""
        for name, stride in self._strides.items():
            self._device.clear(self._caches[name] + row * stride, stride)

    def move(self, source: int, target: int, positions: int) -> None:  # noqa: ARG002
        """Copy a row over another one; what is behind its `positions` is masked, and comes along."""
        for name, stride in self._strides.items():
            place = self._caches[name]
            self._device.move(place + target * stride, place + source * stride, stride)

    def nbytes(self, rows: int) -> int:  # noqa: ARG002
        """Bytes of the caches: those of every row were taken at the start."""
        return self.rows * sum(self._strides.values())

    def run(
        self, rows: slice, ids: TokenIds, past: TokenIds, new: TokenIds, embeddings: FloatArray | None = None
    ) -> FloatArray:
        """Feed new positions to neighbouring rows.

        Args:
            rows: which rows, [start, stop).
            ids: [rows, new] unified ids, padded on the right.
            past: [rows] positions that each row's cache has.
            new: [rows] valid new ids.
            embeddings: [rows, new, width], for the ids that are `EMBEDDED`; None where none is.

        Returns:
            Logits FP32 [rows, speech_rows] of what follows, valid until the next call.

        Raises:
            EngineError: no profile admits so many rows or positions, or the engine fails.

        """
        fed: dict[str, Array] = {"input_ids": ids, "past_counts": past, "new_counts": new}
        if embeddings is not None:
            fed["embeddings"] = embeddings
        context = self._bind(rows, ids.shape[1])
        for name, array in fed.items():
            dtype = self._plan.inputs[name].dtype
            self._device.upload(self._fed[name], np.ascontiguousarray(array, dtype))
        self._plan.enqueue(context, self._device)
        logits = self._logits[: len(ids)]
        self._device.download(logits, self._logits_address)
        self._device.wait()
        return logits.astype(np.float32, copy=False)

    def close(self) -> None:
        """Give the GPU's memory back."""
        self._device.close()

    def _bind(self, rows: slice, new: int) -> Any:
        """The context for so many rows and positions, with all shapes and addresses set."""
        shapes = {
            name: (rows.stop - rows.start, *self._tail(binding, new))
            for name, binding in self._plan.inputs.items()
        }
        profile = self._plan.fitting(shapes)[0]  # a single id is a step
        context = self._plan.context(profile, self._device)
        if self._bound.get(profile) == (rows, new):
            return context  # as in the step before
        self._bound.pop(profile, None)
        places = self._places(rows)
        if not all(context.set_input_shape(name, shape) for name, shape in shapes.items()) or not all(
            context.set_tensor_address(name, address) for name, address in places.items()
        ):
            raise EngineError(f"{self._plan.path}: the engine refuses {shapes}. {self._plan.said()}")
        self._bound[profile] = rows, new
        return context

    def _tail(self, binding: Binding, new: int) -> tuple[int, ...]:
        """The shape of an input behind its batch."""
        _, _, largest = binding.ranges[0]
        if binding.name in self._caches or len(largest) == 1:
            return largest[1:]
        return (new, *largest[2:])

    def _places(self, rows: slice) -> dict[str, Address]:
        """Where each tensor lies for some rows; an updated cache where the cache does."""
        caches = {name: self._caches[name] + rows.start * stride for name, stride in self._strides.items()}
        outputs = {
            name: caches[binding.alias] for name, binding in self._plan.outputs.items() if binding.alias
        }
        return {**self._fed, **caches, **outputs, LOGITS: self._logits_address}


def open_plan(path: Path, *, rows: int, max_positions: int) -> LanguageModel:
    """Open a language model's plan for decoding, with the plan of its text encoder where it has one.

    Raises `EngineError`: TensorRT or CUDA is missing, a plan does not fit them, or it is built for less.
    """
    trt, cuda = tensorrt(), cuda_runtime()
    portable = Manifest.read(path).portable == "version"
    graph = path.with_name(FP32_GRAPH)
    model = LanguageModelPlan(path, graph, trt=trt, cuda=cuda, version_compatible=portable)
    model.fit(max_positions, rows)
    encoder = path.with_name(text_encoder_of(path.name))
    text_encoder = TextEncoder(_Session(encoder, trt, cuda, portable)) if encoder.exists() else None
    return LanguageModel(model, rows, max_positions, text_encoder)


class _Session:
    """A plan that is called as a session of ONNX Runtime is."""

    def __init__(self, plan: Path, trt: Any, cuda: Any, portable: bool) -> None:
        self._runner = PlanRunner(plan, trt=trt, cuda=cuda, version_compatible=portable)

    def run(self, names: list[str], feed: Feed) -> list[Array]:
        outputs = self._runner.run(feed)
        return [outputs[name] for name in names]


def _size(shape: tuple[int, ...], binding: Binding) -> int:
    return math.prod(shape) * binding.dtype.itemsize


def _spec_of(graph: Path) -> LanguageModelSpec:
    try:
        metadata = {p.key: p.value for p in onnx.load(graph, load_external_data=False).metadata_props}
    except FileNotFoundError as error:
        raise EngineError(
            f"{graph} is missing: a plan does not describe itself, the graph that was exported does. "
            f"{how_to_make(graph)}"
        ) from error
    if METADATA_KEY not in metadata:
        raise EngineError(f"{graph} has no metadata {METADATA_KEY!r}: it is no exported language model.")
    return LanguageModelSpec.from_json(metadata[METADATA_KEY])
