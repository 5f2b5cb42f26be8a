"""How far a variant of a graph is from the FP32 graph, and whether that is allowed.

A figure is gathered over the valid entries of all feeds: padded frames, samples and rows do not count.
The language model is judged position by position behind FP32's own cache, as its calibration feeds hold it.
`METRICS` says what is measured; outputs that ONNX Runtime did not compute, those of a TensorRT plan, are
judged by `measure_outputs` in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from cosytriton_engines.quality.distances import Values
from cosytriton_engines.quality.metrics import METRICS, NOT_FINITE, Metric
from cosytriton_ensemble import names
from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.profiles import Precision
from cosytriton_ensemble.spec import Array, Feed

Outputs = Mapping[str, Array]
Figures = dict[str, float]

_COUNTERS = {  # output -> the output that counts its valid entries
    names.PROMPT_TOKENS: names.PROMPT_TOKEN_COUNT,
    names.PROMPT_MEL: names.PROMPT_FRAME_COUNT,
    names.MEL: names.FRAME_COUNT,
    names.WAVEFORM: names.SAMPLE_COUNT,
}
_NEW_COUNTS = "new_counts"  # input of the language model
_STATE_OUT = ("_cache_out.", "_state_out")  # in the names of what a graph carries to its next call
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}


class EvaluationError(CosytritonError):
    """A variant cannot be compared with FP32; the message names the graph or the output."""


class Graph:
    """A graph on ONNX Runtime's CPU; computes what is compared of its outputs.

    Args:
        path: The ONNX file.
        threads: That one operator uses; 0 takes every core.

    Raises:
        EvaluationError: ONNX Runtime refuses the graph.

    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors: casts around half precision are no fault on a CPU
        options.enable_mem_pattern = False  # shapes change from feed to feed
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors have no common class
            raise EvaluationError(f"{path}: ONNX Runtime refuses the graph: {error}") from error
        self._types = {value.name: _TYPES.get(value.type) for value in self._session.get_inputs()}
        outputs = [value.name for value in self._session.get_outputs()]
        # Gigabytes, which are judged by what comes of them.
        self._outputs = [name for name in outputs if not any(part in name for part in _STATE_OUT)]

    def __call__(self, feed: Feed) -> Feed:
        """Run a feed; the outputs, but for the caches of the language model and its rows without new ids."""
        cast = {
            name: feed[name].astype(kind, copy=False) if kind else feed[name]
            for name, kind in self._types.items()
        }
        outputs = dict(zip(self._outputs, self._session.run(self._outputs, cast), strict=True))
        return rows_with_news(feed, outputs)

    def seconds(self, feed: Feed) -> float:
        """How long one run takes."""
        start = time.perf_counter()
        self(feed)
        return time.perf_counter() - start


def rows_with_news(feed: Feed, outputs: Outputs) -> Feed:
    """Drop the rows of a language model that got no new id: their logits say nothing."""
    if _NEW_COUNTS not in feed:
        return dict(outputs)
    return {name: array[feed[_NEW_COUNTS] > 0] for name, array in outputs.items()}


def measure(model: str, reference: Path, variant: Path, feeds: Iterable[Feed], threads: int = 0) -> Figures:
    """Compare two graphs of a model on all feeds: metric name -> figure.

    Raises `EvaluationError` when a graph does not run or the two cannot be compared.
    """
    ours, theirs = Graph(reference, threads), Graph(variant, threads)
    return measure_outputs(model, ((ours(feed), theirs(feed)) for feed in feeds))


def measure_outputs(model: str, pairs: Iterable[tuple[Outputs, Outputs]]) -> Figures:
    """Compare outputs of FP32 with those of a variant, one pair for each feed: metric name -> figure.

    Outputs map output names to arrays [rows, ...] and include the counts of valid entries. Where the variant
    is not finite, every figure is the worst one, and "not_finite" says how much of it is.

    Raises:
        EvaluationError: There is no such model or no pair, the outputs do not fit each other, or FP32 itself
            is not finite.

    """
    metrics, gathered = metrics_of(model), defaultdict[str, list[Values]](list)
    broken = False
    for reference, variant in pairs:
        for name, array in reference.items():
            _check_fit(model, name, array, variant)
            share = NOT_FINITE.values(array, variant[name])
            gathered[NOT_FINITE.name].append(share)
            broken = broken or bool(share.any())
        for metric in () if broken else metrics:
            gathered[metric.name] += [
                metric.values(*row) for row in _rows(model, metric.output, reference, variant)
            ]
    if not broken and not all(gathered[metric.name] for metric in metrics):
        raise EvaluationError(f"{model}: there is nothing to compare, because no feed was given.")
    usable = (NOT_FINITE,) if broken else (NOT_FINITE, *metrics)
    figures = {metric.name: metric.combine(np.concatenate(gathered[metric.name])) for metric in usable}
    worst = {metric.name: metric.worst for metric in metrics}
    return worst | {name: figure for name, figure in figures.items() if np.isfinite(figure)}


def _rows(model: str, name: str, reference: Outputs, variant: Outputs) -> Iterator[tuple[Array, Array]]:
    """Valid entries of each row of an output."""
    counter = _COUNTERS.get(name)
    counter = counter if counter in reference else None  # a graph for one request counts nothing
    if counter is not None and not np.array_equal(reference[counter], variant[counter]):
        raise EvaluationError(
            f"{model}: the variant counts {variant[counter].ravel().tolist()} as {counter!r}, "
            f"FP32 {reference[counter].ravel().tolist()}. Keep the layers that count in FP32."
        )
    for row, (ours, theirs) in enumerate(zip(reference[name], variant[name], strict=True)):
        valid = len(ours) if counter is None else int(reference[counter][row].item())
        if not np.isfinite(ours[:valid]).all():
            raise EvaluationError(
                f"{model}: FP32's own {name!r} is not finite. Export the checkpoint again, or leave the "
                "recording out of the calibration set."
            )
        if valid:
            yield ours[:valid], theirs[:valid]


def _check_fit(model: str, name: str, array: Array, variant: Outputs) -> None:
    given = variant[name].shape if name in variant else "missing"
    if given != array.shape:
        raise EvaluationError(f"{model}: the variant's {name!r} is {given}, FP32's is {array.shape}.")


def metrics_of(model: str) -> tuple[Metric, ...]:
    """The metrics of a model but for `NOT_FINITE`; EvaluationError when there is no such model."""
    if model not in METRICS:
        raise EvaluationError(f"There are no metrics of {model!r}; there are of {', '.join(METRICS)}.")
    return METRICS[model]


def passes(model: str, precision: Precision, figures: Mapping[str, float]) -> bool:
    """Whether every figure is there and within its tolerance."""
    return not failures(model, precision, figures)


def failures(model: str, precision: Precision, figures: Mapping[str, float]) -> tuple[str, ...]:
    """What is wrong with a variant, one clause for each figure beyond its tolerance; empty if nothing is."""
    clauses = []
    for metric in (NOT_FINITE, *metrics_of(model)):
        if precision not in metric.tolerance:
            continue
        value, limit = figures.get(metric.name), metric.text(metric.tolerance[precision])
        if value is None:
            clauses.append(f"{metric.title} was not measured")
        elif not metric.accepts(precision, value):
            bound = "at least" if metric.better == "higher" else "at most"
            clauses.append(f"{metric.title} is {metric.text(value)}, allowed is {bound} {limit}")
    return tuple(clauses)


def floor(model: str, reference: Path, feeds: Iterable[Feed], threads: int = 2) -> Figures:
    """What the metrics say of FP32 against itself: with other threads, and rows in another order.

    One row is given twice, so that a single row is computed in another batch too. No variant can be told
    from FP32 below these figures.
    """
    ours, theirs = Graph(reference, 1), Graph(reference, threads)

    def pairs() -> Iterator[tuple[Outputs, Outputs]]:
        for feed in feeds:
            shuffled = {name: np.concatenate([array, array[:1]])[::-1] for name, array in feed.items()}
            again = theirs({name: np.ascontiguousarray(array) for name, array in shuffled.items()})
            expected = ours(feed)
            yield expected, {n: array[::-1][: len(expected[n])] for n, array in again.items()}

    return measure_outputs(model, pairs())


def speed_ratio(
    reference: Path, variant: Path, feeds: Iterable[Feed], repeats: int = 5, threads: int = 0
) -> float:
    """How many times as fast as FP32 a variant is on this CPU: above 1 is faster.

    Both run in turn in one process, first one and then the other, so that a slow spell hits both; the ratio
    is that of the sums of each feed's median.

    Raises:
        EvaluationError: A graph does not run, or no feed was given.

    """
    graphs = (Graph(reference, threads), Graph(variant, threads))
    totals = [0.0, 0.0]
    for feed in feeds:
        for graph in graphs:
            graph(feed)  # the first run of a shape allocates
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeats):
            for index in (0, 1) if turn % 2 else (1, 0):
                times[index].append(graphs[index].seconds(feed))
        totals = [total + statistics.median(t) for total, t in zip(totals, times, strict=True)]
    if not totals[1]:
        raise EvaluationError(f"{variant}: there is nothing to time, because no feed was given.")
    return totals[0] / totals[1]
