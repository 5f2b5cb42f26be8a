"""What a stage is: a frozen declaration from which everything else is derived.

`Dim`, `Tensor`, `Stage` and `Ensemble` say a thing once. From them come the dynamic axes of the ONNX
graph, the ranges of a TensorRT profile, sample feeds for parity and calibration, Triton's
`config.pbtxt` (`cosytriton_ensemble.config`) and the wiring checks of an ensemble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cosytriton_ensemble.errors import RepositoryError

DataType = Literal["FP32", "INT32", "INT64", "BOOL", "BYTES"]
"""A tensor's type, in the names of Triton's inference protocol."""

Size = Literal["min", "opt", "max"]
Array = npt.NDArray[Any]
Feed = dict[str, Array]

NUMPY_TYPES: Mapping[str, type] = {
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


@dataclass(frozen=True, slots=True)
class Dim:
    """A dynamic dimension: its name, its range, and the grid on which requests are padded.

    Padding to a multiple of `step` gives requests of similar length one shape, so that Triton's dynamic
    batcher can put them into one batch. `base` and `factor` tie a dimension to another one
    (mel frames are `factor` times the tokens).
    """

    name: str
    min: int
    opt: int
    max: int
    step: int = 1
    base: Dim | None = None
    factor: int = 1

    def times(self, factor: int, name: str) -> Dim:
        """A dimension that is always `factor` times this one."""
        return Dim(
            name, self.min * factor, self.opt * factor, self.max * factor, self.step * factor, self, factor
        )

    def size(self, which: Size) -> int:
        """The smallest, usual or largest extent."""
        return {"min": self.min, "opt": self.opt, "max": self.max}[which]

    def padded(self, extent: int, gathered: bool = True) -> int:
        """The extent on the padding grid, or, for requests that no batch gathers, the least one there is."""
        if not gathered:
            return max(self.min, extent)
        return max(1, -(-extent // self.step)) * self.step


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a stage, without its batch dimension.

    `counts` marks a length: the tensor says how many entries along that dimension are valid, the rest
    is padding. `high` bounds the ids of an integer tensor (exclusive) in sample feeds.
    """

    name: str
    dtype: DataType
    dims: tuple[int | Dim, ...]
    counts: Dim | None = None
    high: int = 2
    optional: bool = False

    @property
    def numpy_type(self) -> type:
        """The element type in numpy."""
        return NUMPY_TYPES[self.dtype]

    def shape(self, which: Size) -> tuple[int, ...]:
        """The concrete shape at one size, without the batch dimension."""
        return tuple(d.size(which) if isinstance(d, Dim) else d for d in self.dims)


@dataclass(frozen=True, slots=True)
class Stage:
    """One Triton model: its tensors and how it is served.

    `backend` "onnxruntime" is a native stage (an exported graph), "python" a model of this package.
    `tolerance` is the largest absolute error against the PyTorch module that the export accepts.
    `learned` is false for signal processing without weights, which stays FP32 in every profile.
    `own_graph` marks a Python model that runs an exported graph itself, because it carries state from call to
    call; `planned` is false where TensorRT profiles do without that graph.
    `cached` lets Triton's response cache answer a repeated input. `parameters` are settings that the
    model reads from its configuration.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    backend: Literal["onnxruntime", "python"] = "onnxruntime"
    max_batch: int = 1
    queue_delay_us: int = 0
    instances: int = 1
    decoupled: bool = False
    cached: bool = False
    tolerance: float = 1e-4
    learned: bool = True
    own_graph: bool = False
    planned: bool = True
    parameters: tuple[tuple[str, int | str], ...] = ()

    @property
    def has_graph(self) -> bool:
        """Whether an exported graph belongs to the stage."""
        return self.own_graph or self.backend != "python"

    def dims(self) -> dict[str, Dim]:
        """Every dynamic dimension by name."""
        tensors = (*self.inputs, *self.outputs)
        return {d.name: d for t in tensors for d in t.dims if isinstance(d, Dim)}

    def axes(self) -> dict[str, dict[int, str]]:
        """Dynamic axes of the ONNX graph: tensor name -> axis -> dimension name; axis 0 is the batch."""
        return {
            t.name: {0: "batch"} | {i: d.name for i, d in enumerate(t.dims, 1) if isinstance(d, Dim)}
            for t in (*self.inputs, *self.outputs)
        }

    def profile(self) -> dict[str, dict[Size, tuple[int, ...]]]:
        """The TensorRT optimization profile: input name -> (min, opt, max) shapes with the batch."""
        batch: dict[Size, int] = {"min": 1, "opt": max(1, self.max_batch // 2), "max": self.max_batch}
        return {t.name: {s: (batch[s], *t.shape(s)) for s in batch} for t in self.inputs}

    def sample(self, which: Size = "opt", batch: int = 1, seed: int = 0, ragged: bool = True) -> Feed:
        """A seeded feed for parity and tests: input name -> array [batch, ...].

        Row 0 uses the full length; with `ragged` the other rows get random shorter ones.
        """
        rng = np.random.default_rng(seed)
        counts: dict[str, Array] = {}
        for dim in self.dims().values():
            root = dim.base or dim
            if root.name not in counts:
                full = root.size(which)
                rows = rng.integers(root.min, full + 1, batch) if ragged else np.full(batch, full)
                rows[0] = full
                counts[root.name] = rows
        return {t.name: _sample(t, which, batch, rng, counts) for t in self.inputs}


def _sample(
    tensor: Tensor, which: Size, batch: int, rng: np.random.Generator, counts: Mapping[str, Array]
) -> Array:
    shape = (batch, *tensor.shape(which))
    if tensor.counts is not None:
        root = tensor.counts.base or tensor.counts
        return (counts[root.name] * tensor.counts.factor).reshape(shape).astype(tensor.numpy_type)
    if tensor.dtype == "FP32":
        return rng.normal(0, 0.3, shape).astype(np.float32)
    if tensor.dtype == "BYTES":
        return np.full(shape, b"sample", np.object_)
    return rng.integers(0, tensor.high, shape).astype(tensor.numpy_type)


@dataclass(frozen=True, slots=True)
class Step:
    """One node of an ensemble: model input -> ensemble tensor, model output -> ensemble tensor."""

    stage: Stage
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A graph of stages that Triton runs as one model. Wiring is checked when it is declared."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        known = {t.name: t for t in self.inputs}
        for step in self.steps:
            _check_names(self.name, step, "input", step.inputs, step.stage.inputs)
            _check_names(self.name, step, "output", step.outputs, step.stage.outputs)
            for tensor in step.stage.inputs:
                if tensor.name in step.inputs:
                    self._connect(step, tensor, known.get(step.inputs[tensor.name]))
            known |= {step.outputs[t.name]: t for t in step.stage.outputs if t.name in step.outputs}
        for tensor in self.outputs:
            self._connect(None, tensor, known.get(tensor.name))
        used = {t.name for t in self.outputs}.union(*(step.inputs.values() for step in self.steps))
        if unused := sorted(known.keys() - used):
            raise RepositoryError(f"ensemble {self.name!r}: nobody uses {unused}; Triton refuses that.")

    def _connect(self, step: Step | None, wanted: Tensor, given: Tensor | None) -> None:
        place = f"ensemble {self.name!r}: " + (f"step {step.stage.name!r}, " if step else "output ")
        if given is None:
            raise RepositoryError(f"{place}{wanted.name!r} is fed by no earlier step and no ensemble input.")
        if given.dtype != wanted.dtype or not _fits(given.dims, wanted.dims):
            raise RepositoryError(
                f"{place}{wanted.name!r} wants {wanted.dtype} {_text(wanted.dims)}, "
                f"but {given.name!r} is {given.dtype} {_text(given.dims)}."
            )


def _fits(given: tuple[int | Dim, ...], wanted: tuple[int | Dim, ...]) -> bool:
    if len(given) != len(wanted):
        return False
    pairs = zip(given, wanted, strict=True)
    return all(isinstance(g, Dim) == isinstance(w, Dim) and (isinstance(g, Dim) or g == w) for g, w in pairs)


def _text(dims: Iterable[int | Dim]) -> str:
    return "[" + ", ".join(d.name if isinstance(d, Dim) else str(d) for d in dims) + "]"


def _check_names(
    ensemble: str, step: Step, kind: str, wired: Mapping[str, str], tensors: tuple[Tensor, ...]
) -> None:
    required = {t.name for t in tensors if kind == "input" and not t.optional}
    unknown, missing = set(wired) - {t.name for t in tensors}, required - set(wired)
    if unknown or missing:
        raise RepositoryError(
            f"ensemble {ensemble!r}: step {step.stage.name!r} has unknown {kind}s {sorted(unknown)} "
            f"and lacks {sorted(missing)}."
        )
