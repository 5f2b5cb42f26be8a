"""Parity: an exported graph on ONNX Runtime against the PyTorch module it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from cosytriton_ensemble.spec import Array, Dim, Feed, Size, Stage, Tensor
from cosytriton_export.errors import ExportError

SIZES: tuple[Size, ...] = get_args(Size)
BATCHES = (1, 3)  # 3: a graph that was traced with 2 rows must take another number
# The flow takes most of the time: ten steps of its largest network, twice for each row. 1 s of speech behind
# 1 s of reference stand for its usual request, 2 s of each for the largest. Other dimensions are whole.
_CAPS = {"tokens": (25, 50), "frames": (90, 180)}  # opt and max
# An id is a rounded number; where that lies on the edge, two runtimes may round it differently.
ID_TIES = 1e-3  # share of the ids

Reference = Callable[[Feed], Sequence[Array]]
Feeds = Mapping[tuple[Size, int], Feed]
Errors = dict[tuple[Size, int], float]


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One line of the export's table.

    `errors` holds the largest error by size and number of rows, relative to the output's largest magnitude
    where that is above 1; it is empty for an artifact that is no graph.
    """

    stage: str
    opset: int | None
    megabytes: float
    tolerance: float
    errors: Errors


def measure(path: Path, reference: Reference, feeds: Feeds, tolerance: float) -> Errors:
    """Run the graph at `path` and `reference` on each feed.

    Raises `ExportError` when ONNX Runtime refuses the graph, an output is not finite, or an error is beyond
    `tolerance`; the message names the output, the size and the error.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors: a cache that is copied rather than updated in place is none here
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common class
        raise ExportError(f"{path}: ONNX Runtime refuses the graph: {error}") from error
    names = [output.name for output in session.get_outputs()]
    errors: Errors = {}
    for (size, batch), feed in feeds.items():
        wanted, given = reference(feed), session.run(names, feed)
        worst = 0.0
        for name, w, g in zip(names, wanted, given, strict=True):
            place = f"{path}: output {name!r} at size {size!r} with {batch} rows"
            difference, limit = _difference(place, w, g), tolerance
            if np.issubdtype(w.dtype, np.integer) and w.shape[1:] != (1,):
                limit = max(limit, ID_TIES)
            if difference > limit:
                raise ExportError(
                    f"{place} differs from PyTorch by {difference:.2e}, allowed is {limit:.0e}."
                )
            worst = max(worst, difference)
        errors[size, batch] = worst
    return errors


def _difference(place: str, wanted: Array, given: Array) -> float:
    """Return the largest error of a real output, the share of differing entries of an integer one."""
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        raise ExportError(
            f"{place} is {given.dtype} {list(given.shape)}, "
            f"PyTorch gives {wanted.dtype} {list(wanted.shape)}."
        )
    if not wanted.size:
        return 0.0
    if np.issubdtype(wanted.dtype, np.integer):
        return float(np.mean(wanted != given))
    if not (np.isfinite(wanted).all() and np.isfinite(given).all()):
        raise ExportError(f"{place} is not finite. The weights are damaged or out of range.")
    return float(np.abs(wanted - given).max() / max(1.0, np.abs(wanted).max()))


def stage_reference(stage: Stage, module: nn.Module) -> Reference:
    """Wrap the stage's module: feed -> outputs, as arrays."""

    def run(feed: Feed) -> list[Array]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(feed[tensor.name]) for tensor in stage.inputs))
        return [output.numpy() for output in outputs]

    return run


def stage_feeds(stage: Stage) -> Feeds:
    """Sample a feed for each size and number of rows."""
    capped = _capped(stage)
    return {(size, batch): capped.sample(size, batch) for size in SIZES for batch in BATCHES}


def _capped(stage: Stage) -> Stage:
    def cap(dim: Dim) -> Dim:
        if dim.base is not None:
            return cap(dim.base).times(dim.factor, dim.name)
        caps = (cap for unit, cap in _CAPS.items() if dim.name.endswith(unit))
        usual, largest = next(caps, (dim.opt, dim.max))
        return replace(dim, opt=min(dim.opt, usual), max=min(dim.max, largest))

    def tensor(given: Tensor) -> Tensor:
        dims = tuple(cap(d) if isinstance(d, Dim) else d for d in given.dims)
        return replace(given, dims=dims, counts=given.counts and cap(given.counts))

    return replace(stage, inputs=tuple(map(tensor, stage.inputs)), outputs=tuple(map(tensor, stage.outputs)))


def format_table(rows: Sequence[ParityRow], *, untrained: bool) -> str:
    """Lay out the rows as a Markdown table; errors are given for 1 / more rows."""
    head = ["stage", "opset", "MB", *(f"error at {size}" for size in SIZES), "tolerance"]
    body = [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *body]
    padded = (" | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
    table = "\n".join(f"| {line} |" for line in padded)
    note = f"Errors against PyTorch with {BATCHES[0]} / {BATCHES[1]} rows."
    return f"{table}\n{note}" + ("\nuntrained: its sound is noise" if untrained else "")


def _cells(row: ParityRow) -> list[str]:
    errors = [
        " / ".join(f"{row.errors[size, b]:.1e}" for b in BATCHES if (size, b) in row.errors) or "-"
        for size in SIZES
    ]
    opset = str(row.opset) if row.opset else "-"
    return [row.stage, opset, f"{row.megabytes:.1f}", *errors, f"{row.tolerance:g}" if row.errors else "-"]
