"""What a graph does on real feeds: the range of its values, and the noise that each layer alone would add.

Both are measured inside the graph: a reduction or a degraded twin of a layer stands beside it, also in the
body of a loop, and only single numbers come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision.surgery import expose, insert, is_real, load, place, session, type_of
from cosytriton_ensemble.spec import Feed

NODES_AT_ONCE = 256  # that get a twin: what they read is held in memory until the twin has run
Range = tuple[float, float]
Degrade = Callable[[ir.Value], ir.Value]
"""A value -> what is left of it in lower precision."""


def value_ranges(
    path: Path, feeds: Iterable[Feed], values: Callable[[ir.Model], list[ir.Value]]
) -> dict[str, Range]:
    """Smallest and largest entry of each chosen value over all feeds, by the value's name."""
    model = load(path)
    chosen = {str(value.name): value for value in values(model)}
    taps = {
        f"{operator} {name}": insert(value, operator, [value], type_of(value), keepdims=0)
        for name, value in chosen.items()
        for operator in ("ReduceMin", "ReduceMax")
    }
    if not taps:
        return {}
    expose(model, taps)
    opened = session(model)
    found: dict[str, list[float]] = {name: [] for name in taps}
    for feed in feeds:
        for name, array in zip(taps, opened.run(list(taps), feed), strict=True):
            found[name] += [float(array.min()), float(array.max())] if array.size else []
    return {name: (min(found[f"ReduceMin {name}"]), max(found[f"ReduceMax {name}"])) for name in chosen}


def layer_noise(
    path: Path,
    feeds: Iterable[Feed],
    nodes: Callable[[ir.Model], list[ir.Node]],
    degrade: Callable[[ir.Node], Degrade],
    degrade_output: Degrade | None = None,
) -> dict[str, float]:
    """Noise-to-signal power ratio of each node when it alone is degraded and what it reads is exact.

    Infinite where the degraded node overflows, by the node's name.
    """
    feeds = list(feeds)
    noise: dict[str, float] = {}
    for start in count(0, NODES_AT_ONCE):
        model = load(path)
        chosen = nodes(model)[start : start + NODES_AT_ONCE]
        if not chosen:
            return noise
        taps = _noise_taps(chosen, degrade, degrade_output)
        expose(model, taps)
        opened = session(model)
        power = dict.fromkeys(taps, 0.0)
        for feed in feeds:
            for name, array in zip(taps, opened.run(list(taps), feed), strict=True):
                power[name] += float(array.astype(np.float64).sum())
        names = (str(node.name) for node in chosen)
        noise |= {name: _ratio(power[f"noise {name}"], power[f"signal {name}"]) for name in names}
    return noise


def _noise_taps(
    nodes: Iterable[ir.Node], degrade: Callable[[ir.Node], Degrade], degrade_output: Degrade | None
) -> dict[str, ir.Value]:
    """Power of the noise and of the signal of each node."""
    taps: dict[str, ir.Value] = {}
    for node in nodes:
        exact, degraded = node.outputs[0], _twin(node, degrade(node))
        if degrade_output is not None:
            degraded = degrade_output(degraded)
        error, kind = insert(degraded, "Sub", [exact, degraded], type_of(exact)), type_of(exact)
        taps[f"noise {node.name}"] = insert(error, "ReduceSumSquare", [error], kind, keepdims=0)
        taps[f"signal {node.name}"] = insert(exact, "ReduceSumSquare", [exact], kind, keepdims=0)
    return taps


def _ratio(noise: float, signal: float) -> float:
    if not np.isfinite(signal):
        return 0.0  # a mask: FP32 has its infinities too
    return noise / (signal or 1.0) if np.isfinite(noise) else np.inf


def _twin(node: ir.Node, degrade: Degrade) -> ir.Value:
    """Add a copy of the node that reads degraded inputs; returns its output."""
    inputs = [degrade(value) if value is not None and is_real(value) else value for value in node.inputs]
    twin = ir.Node(node.domain, node.op_type, inputs, node.attributes, num_outputs=len(node.outputs))
    for output, original in zip(twin.outputs, node.outputs, strict=True):
        output.type = original.type
    place(node.outputs[0], twin)
    return twin.outputs[0]
