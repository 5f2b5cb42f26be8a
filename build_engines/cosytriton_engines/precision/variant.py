"""The variants of one graph: half precision, INT8 for the CPU, INT8 for TensorRT.

Each is measured against FP32 on calibration feeds that it was not calibrated on. Layers that cannot bear half
precision are found first, since no layer that needs FP32 is asked to do with 8 bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from cosytriton_engines.precision import fusion, half, quantize
from cosytriton_engines.precision.attention import skip_empty_masks
from cosytriton_engines.precision.probe import Degrade, Range, layer_noise, value_ranges
from cosytriton_engines.precision.search import Figures, Journal, Outcome, search
from cosytriton_engines.precision.snake import tabulate_snakes
from cosytriton_engines.precision.state import carry_integers
from cosytriton_engines.precision.surgery import load, save
from cosytriton_engines.quality.evaluate import Graph, measure_outputs, metrics_of, passes
from cosytriton_ensemble.profiles import INT8_GRAPH, QDQ_GRAPH, Precision, Profile
from cosytriton_ensemble.spec import Feed

CALIBRATION_FEEDS, JUDGING_FEEDS = 16, 32  # at most, of each model
LANGUAGE_MODEL = "speech_lm"

MOST_GROUPS = 64  # that are tried alone: each takes a run of the stage

Make = Callable[[Sequence[str]], ir.Model]
"""The layers that are kept -> a graph that computes as with the others in lower precision."""

Noise = Callable[[], dict[str, float]]
"""Measures the noise-to-signal power ratio that each layer alone adds."""

Progress = Callable[[str], None]


class Feeds(Protocol):
    """What a `CalibrationSet` gives."""

    def calibrating(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        """What ranges are taken from."""

    def judging(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        """What variants are judged by."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A graph in another precision, and how it was found.

    Attributes:
        figures: quality against FP32.
        kept: layers in higher precision -> why.
        trials: what the search tried.
        sensitivity: noise-to-signal power ratio that each layer alone adds, where the curve was asked for.

    """

    model: ir.Model
    figures: Figures
    kept: Mapping[str, str]
    outcome: Outcome
    sensitivity: Mapping[str, float]


class Variants:
    """Makes the variants of one FP32 graph.

    Args:
        model: name of the model, as the calibration set and the metrics know it.
        path: the FP32 graph.
        calibration: the feeds.
        journal: remembers what was measured.
        curve: measure the loss over layers kept beyond what the choice needs.

    """

    def __init__(
        self,
        model: str,
        path: Path,
        calibration: Feeds,
        journal: Journal,
        progress: Progress,
        curve: bool = False,
    ) -> None:
        self.model, self.path, self.calibration = model, path, calibration
        self._journal, self._progress, self._curve = journal, progress, curve
        self._reference: list[tuple[Feed, Feed]] | None = None

    def make(self, profile: Profile) -> Variant:
        """The graph that a profile serves, or that its plan is built from.

        Raises `BuildError` when no choice of layers keeps the tolerance.
        """
        if profile.graph == INT8_GRAPH:
            return self._weights() if self.model == "text_encoder" else self._integers()
        return self._integers_in_half() if profile.graph == QDQ_GRAPH else self._half()

    def _half(self) -> Variant:
        ranges = self._ranges("half", lambda model: [node.outputs[0] for node in half.real_nodes(model)])
        overflows = half.overflowing(load(self.path), ranges)
        noise = self._noise("half", half.real_nodes, lambda _: half.rounded, half.rounded)

        def amplifiers(kept: Sequence[str]) -> list[str]:
            return [name for name in kept if np.isfinite(noise()[name])]

        def ranked() -> list[list[str]]:
            broken = [name for name in noise() if not np.isfinite(noise()[name])]
            return [*([broken] if broken else []), *([name] for name in amplifiers(_ranked(noise())))]

        def names(kept: Sequence[str]) -> set[str]:
            model = load(self.path)
            keep = half.with_ancestors(model, amplifiers(kept)).union(kept, overflows)
            return half.half_names(model, keep)

        def twin(kept: Sequence[str]) -> ir.Model:
            return half.simulate_half(load(self.path), names(kept))

        outcome = self._search("fp16", "half", ranked, twin)
        loud = amplifiers(outcome.kept)
        before = half.with_ancestors(load(self.path), loud) - set(loud)
        kept = dict.fromkeys(sorted(before), "feeds a layer that amplifies rounding")
        kept |= {name: f"amplifies rounding: {_decibels(noise()[name])} alone" for name in loud}
        broken = [name for name in outcome.kept if name not in loud]
        kept |= dict.fromkeys((*overflows, *broken), "overflows in half precision")
        model = load(self.path)
        graph = half.to_half(model, names(outcome.kept), _caches(model))
        return Variant(graph, outcome.figures, kept, outcome, noise() if self._curve else {})

    def _integers(self) -> Variant:
        """Q/DQ as ONNX Runtime wants it; what a language model keeps reads 16 bits."""
        ranges = self._ranges("layers", quantize.observed)

        def graph(kept: Sequence[str]) -> ir.Model:
            model, decoder = load(self.path), self.model == LANGUAGE_MODEL
            keep, fine = ((), kept) if decoder else (kept, ())
            quantize.quantize(model, ranges, keep, quantize.ONNXRUNTIME, fine)
            if decoder:
                fusion.fuse(model)
            return tabulate_snakes(skip_empty_masks(carry_integers(quantize.quantize_tables(model))))

        noise = self._noise("integers", _quantizable, quantize.degraded(ranges, quantize.ONNXRUNTIME))
        outcome = self._quantize("integers", noise, (), graph)
        return self._quantized(graph(outcome.kept), outcome, noise, {})

    def _integers_in_half(self) -> Variant:
        """Q/DQ as TensorRT wants it, around half precision; what needs FP32 is not quantized."""
        ranges, full = self._ranges("layers", quantize.observed), self._half().kept
        names = half.half_names(load(self.path), full)

        def quantized(kept: Sequence[str]) -> ir.Model:
            return quantize.quantize(load(self.path), ranges, {*full, *kept}, quantize.TENSORRT)

        def twin(kept: Sequence[str]) -> ir.Model:
            return half.simulate_half(quantized(kept), names)

        noise = self._noise("half integers", _quantizable, quantize.degraded(ranges, quantize.TENSORRT))
        outcome = self._quantize("half integers", noise, full, twin)
        model = quantized(outcome.kept)
        return self._quantized(half.to_half(model, names, _caches(model)), outcome, noise, full)

    def _weights(self) -> Variant:
        """Integer weights alone: CosyVoice 1's text encoder on a CPU."""
        noise = self._noise("weights", _products, quantize.degraded_weights)

        def graph(kept: Sequence[str]) -> ir.Model:
            return quantize.quantize_tables(quantize.quantize_weights(load(self.path), kept))

        outcome = self._quantize("weights", noise, (), graph)
        return self._quantized(graph(outcome.kept), outcome, noise, {})

    def _quantize(self, kind: str, noise: Noise, full: Collection[str], graph: Make) -> Outcome:
        def ranked() -> list[list[str]]:
            names = [name for name in _ranked(noise()) if name not in full]
            if self.model == LANGUAGE_MODEL:  # its layers are alike, and each trial writes half a gigabyte
                return [[name] for name in names]
            return self._costliest(kind, names, graph)

        return self._search("int8", kind, ranked, graph)

    def _quantized(self, graph: ir.Model, outcome: Outcome, noise: Noise, full: Mapping[str, str]) -> Variant:
        layers = [str(node.name) for node in _quantizable(load(self.path))]
        kept = {name: full[name] for name in layers if name in full}
        kept |= {name: f"costs most: {_decibels(noise()[name])} alone" for name in outcome.kept}
        return Variant(graph, outcome.figures, kept, outcome, noise() if self._curve else {})

    def _costliest(self, kind: str, names: Sequence[str], graph: Make) -> list[list[str]]:
        """Rank groups of layers by what the output loses when they alone are quantized."""
        groups = _groups(names)
        metric = [metric for metric in metrics_of(self.model) if "int8" in metric.tolerance][-1]
        feed = smallest(self.calibration.judging(self.model))
        wanted = Graph(self.path)(feed)

        def loss(number: int, group: Sequence[str]) -> float:
            self._progress(f"{self.model}: {group[0]} alone, {number} of {len(groups)}")
            model = graph([name for name in names if name not in group])
            figure = measure_outputs(self.model, [(wanted, _opened(model)(feed))])[metric.name]
            return -figure if metric.better == "higher" else figure

        losses = [
            self._journal.recall(f"{kind}, {group[0]} alone", lambda: loss(number, group))  # noqa: B023
            for number, group in enumerate(groups, 1)
        ]
        order = sorted(range(len(groups)), key=lambda index: -losses[index])
        return [groups[index] for index in order]

    def _ranges(self, kind: str, values: Callable[[ir.Model], list[ir.Value]]) -> dict[str, Range]:
        self._progress(f"{self.model}: ranges ({kind})")
        feeds = self.calibration.calibrating(self.model, CALIBRATION_FEEDS)
        found = self._journal.recall(f"ranges {kind}", lambda: value_ranges(self.path, feeds, values))
        return {name: (low, high) for name, (low, high) in found.items()}

    def _noise(
        self,
        kind: str,
        nodes: Callable[[ir.Model], list[ir.Node]],
        degrade: Callable[[ir.Node], Degrade],
        degrade_output: Degrade | None = None,
    ) -> Noise:
        """Measure it when it is asked for: it ranks layers, and nothing need be ranked where all pass."""

        def measured() -> dict[str, float]:
            self._progress(f"{self.model}: noise of each layer ({kind})")
            feed = smallest(self.calibration.calibrating(self.model))
            return layer_noise(self.path, [feed], nodes, degrade, degrade_output)

        return lambda: self._journal.recall(f"noise {kind}", measured)

    def _search(
        self, precision: Precision, kind: str, ranked: Callable[[], Sequence[Sequence[str]]], graph: Make
    ) -> Outcome:
        def attempt(kept: Sequence[str]) -> Figures:
            self._progress(f"{self.model}: {kind} with {len(kept)} layers kept")
            step = f"{kind} but for {', '.join(kept) or 'none'}"
            figures: Figures = self._journal.recall(step, lambda: self._judge(graph(kept)))
            return figures

        name = f"{self.path} as {precision}"
        return search(
            name, ranked, attempt, lambda figures: passes(self.model, precision, figures), self._curve
        )

    def _judge(self, model: ir.Model) -> dict[str, float]:
        if self._reference is None:
            fp32 = Graph(self.path)
            self._reference = [
                (feed, fp32(feed)) for feed in self.calibration.judging(self.model, JUDGING_FEEDS)
            ]
        variant = _opened(model)
        return measure_outputs(self.model, ((wanted, variant(feed)) for feed, wanted in self._reference))


def _opened(model: ir.Model) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(model, path)
        return Graph(path)


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Layers one by one or, where they are many, those of a module together."""
    groups: dict[str, list[str]] = {}
    for depth in range(max((name.count(".") for name in names), default=0) + 1, 0, -1):
        groups = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= MOST_GROUPS:
            break
    return list(groups.values())


def smallest(feeds: Iterator[Feed]) -> Feed:
    """The cheapest feed to run: that with the least that is new, behind whatever caches."""
    return min(feeds, key=lambda feed: sum(a.size for name, a in feed.items() if "_cache." not in name))


def _ranked(noise: Mapping[str, float]) -> list[str]:
    return sorted(noise, key=lambda name: -noise[name])


def _quantizable(model: ir.Model) -> list[ir.Node]:
    return list(quantize.quantizable(model).values())


def _products(model: ir.Model) -> list[ir.Node]:
    return [node for node in _quantizable(model) if node.op_type == "MatMul"]


def _caches(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.inputs if "_cache." in str(value.name)]


def _decibels(ratio: float) -> str:
    return f"{10 * np.log10(ratio):.0f} dB of noise" if ratio > 0 else "no noise"
