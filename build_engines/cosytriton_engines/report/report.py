"""The report of a build: what each variant weighs, how far it is from FP32, and what was kept for that.

`report_html` and `report_markdown` make a page of it; the same report gives the same bytes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Self

from cosytriton_engines.precision.search import Trial
from cosytriton_engines.quality.evaluate import failures, metrics_of
from cosytriton_engines.quality.metrics import NOT_FINITE, Metric
from cosytriton_engines.report.pictures import Picture
from cosytriton_ensemble.profiles import Precision

UNTRAINED = (
    "The checkpoint is untrained: its weights are random. The figures say that everything is wired as it "
    "should be, and nothing about how a trained voice would sound."
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures were measured."""

    cpu: str
    cores: int
    onnxruntime: str
    gpu: str = ""

    @classmethod
    def here(cls, gpu: str = "") -> Self:
        """This machine; cores are those that this process may use."""
        lines = _read("/proc/cpuinfo").splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cpu = next(models, platform.processor() or platform.machine())
        return cls(cpu, len(os.sched_getaffinity(0)), metadata.version("onnxruntime"), gpu)

    def __str__(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ", no GPU"
        return f"{self.cpu}, {self.cores} cores{gpu}, ONNX Runtime {self.onnxruntime}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class StageReport:
    """One variant of one model.

    Attributes:
        model: a stage, "speech_lm" or "text_encoder".
        precision: of the weights.
        artifact: file name of the graph or plan.
        megabytes, fp32_megabytes: sizes of it and of the FP32 graph, in 10^6 bytes.
        figures: what `measure` returned.
        floor: what `floor` returned, empty if it was not measured.
        speed_ratio: how many times as fast as FP32 on this CPU, None if it was not timed.
        kept: layers in higher precision -> why.
        trials: the graphs that the search tried.
        sensitivity: noise-to-signal power ratio that each layer alone adds, by its name.
        picture: what FP32 and the variant made of one feed.

    """

    model: str
    precision: Precision
    artifact: str
    megabytes: float
    fp32_megabytes: float
    figures: Mapping[str, float]
    floor: Mapping[str, float] = field(default_factory=dict)
    speed_ratio: float | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    picture: Picture | None = None

    @property
    def name(self) -> str:
        """Model and artifact, as one reads them."""
        return f"{self.model} {self.precision} ({self.artifact})"

    @property
    def failures(self) -> tuple[str, ...]:
        """What is beyond its tolerance, in words."""
        return failures(self.model, self.precision, self.figures)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the figures mean; that of NaN only where there is one."""
        broken = self.figures.get(NOT_FINITE.name)
        return (*([NOT_FINITE] if broken else []), *metrics_of(self.model))

    @property
    def judged(self) -> Metric:
        """The metric that stands for the variant where there is room for one: that of the first failure."""
        limited = [metric for metric in self.metrics if self.precision in metric.tolerance]
        beyond = (m for m in limited if not m.accepts(self.precision, self.figures.get(m.name, m.worst)))
        return next(beyond, limited[0])

    @property
    def size_ratio(self) -> float:
        """Its size as a share of that of FP32."""
        return self.megabytes / self.fp32_megabytes

    def cells(self, metric: Metric) -> tuple[str, str, str, str]:
        """One metric in words: the verdict, the figure, what is allowed, and FP32 against itself."""
        value, own = self.figures.get(metric.name), self.floor.get(metric.name)
        figure = "not measured" if value is None else metric.text(value)
        floor = "-" if own is None else metric.text(own)
        if self.precision not in metric.tolerance:
            return "", figure, "informs", floor
        sign = "≥" if metric.better == "higher" else "≤"
        limit = f"{sign} {metric.text(metric.tolerance[self.precision])}"
        passed = value is not None and metric.accepts(self.precision, value)
        return verdict(passed), figure, limit, floor


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A build.

    Attributes:
        checkpoint: its name or digest.
        family: title of the model family.
        untrained: whether its weights are random.
        calibration: digest of the calibration set.
        warnings: of the calibration set.
        machine: where it was measured.
        date: when, as it shall be read.
        stages: the variants, those of one model after each other.

    """

    checkpoint: str
    family: str
    untrained: bool
    calibration: str
    warnings: tuple[str, ...]
    machine: Machine
    date: str
    stages: tuple[StageReport, ...]

    @property
    def models(self) -> dict[str, list[StageReport]]:
        """The variants of each model."""
        found: dict[str, list[StageReport]] = {}
        for stage in self.stages:
            found.setdefault(stage.model, []).append(stage)
        return found

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """What stands at the head, as (title, text)."""
        return (
            ("Model family", self.family),
            ("Calibration set", self.calibration),
            ("Measured on", str(self.machine)),
            ("Date", self.date),
        )

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        beyond = [stage.name for stage in self.stages if stage.failures]
        good, total = len(self.stages) - len(beyond), len(self.stages)
        if not beyond:
            return "Every variant is within its tolerance of FP32."
        return (
            f"{good} of {total} variants are within their tolerance of FP32. Beyond it: {', '.join(beyond)}."
        )


def verdict(passed: bool) -> str:
    """A mark and a word, so that no colour is needed."""
    return "✓ pass" if passed else "✕ fail"


def size_text(megabytes: float) -> str:
    """Megabytes with three digits or so."""
    return (
        f"{megabytes:,.0f}"
        if megabytes >= 100
        else f"{megabytes:.1f}"
        if megabytes >= 1
        else f"{megabytes:.2f}"
    )


def speed_text(ratio: float | None) -> str:
    """How many times as fast."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def kept_by_reason(kept: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the layers that are kept for it."""
    reasons: dict[str, list[str]] = {}
    for layer, reason in kept.items():
        reasons.setdefault(reason, []).append(layer)
    return reasons
