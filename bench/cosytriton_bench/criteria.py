"""What the figures are to be, in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cosytriton_bench.measure import Figures


@dataclass(frozen=True, slots=True)
class Criterion:
    """A limit of one figure, or of the ratio of two: `over` / `figure`, or `figure` / `over` of a share.

    Attributes:
        group: the criteria of one kind share it.
        name: of the line.
        figure: what is limited.
        limit: the least or the most that is allowed.
        kind: `times` as fast as `over`; `share` of `over`, at most; `gain` over `over` in a rate, at least;
            `at most` of the figure itself.
        over: what it is compared with.
        unit: behind the number.

    """

    group: str
    name: str
    figure: str
    limit: float
    kind: Literal["times", "share", "gain", "at most"]
    over: str = ""
    unit: str = "x"

    @property
    def sign(self) -> str:
        """How the figure must stand to the limit."""
        return "<=" if self.kind in ("share", "at most") else ">="

    def value(self, figures: Figures) -> float | None:
        """The figure, or None where it was not measured."""
        if self.figure not in figures or (self.over and self.over not in figures):
            return None
        median = figures[self.figure].median
        if not self.over:
            return median
        other = figures[self.over].median
        return other / median if self.kind == "times" else median / other

    def met(self, figures: Figures) -> bool | None:
        """Whether it is met; None where it was not measured."""
        value = self.value(figures)
        if value is None:
            return None
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    def line(self, figures: Figures) -> str:
        """One line for people and scripts."""
        value = self.value(figures)
        given = "not measured" if value is None else f"{value:.3g}{self.unit}"
        missed = " MISSED" if self.met(figures) is False else ""
        return f"{self.group} {self.name} {given} ({self.sign} {self.limit:g}){missed}"


def _faster(group: str, case: str, variant: str, least: float) -> Criterion:
    precision = {"cpu": "fp32", "cpu_int8": "int8"}[variant]
    return Criterion(group, f"{case}_{precision}", f"{case}/{variant}", least, "times", over=f"{case}/eager")


CRITERIA: tuple[Criterion, ...] = (
    _faster("D1", "lm_decode_b1", "cpu", 3),
    _faster("D1", "lm_decode_b1", "cpu_int8", 11),
    _faster("D1", "lm_decode_b8", "cpu_int8", 14),
    _faster("D1", "lm_prefill", "cpu_int8", 6),
    _faster("D2", "flow", "cpu", 1.45),
    _faster("D2", "flow", "cpu_int8", 2.6),
    _faster("D2", "vocoder", "cpu_int8", 2.2),
    _faster("D3", "unary", "cpu_int8", 5),
    Criterion("D3", "rtf", "rtf/cpu_int8", 1.35, "at most", unit=""),
    Criterion("D3", "overhead", "overhead/cpu_int8", 4, "at most", unit=" %"),
    Criterion("D4", "stream_cpu", "long_stream:cpu/cpu_int8", 1.15, "share", over="long_unary:cpu/cpu_int8"),
    Criterion("D5", "concurrent_8", "rate_8/cpu_int8", 6, "gain", over="rate/eager"),
    Criterion("D5", "concurrent_16_of_8", "rate_16/cpu_int8", 1, "gain", over="rate_8/cpu_int8"),
    Criterion(
        "D5", "first_audio_among_long", "first_audio_loaded/cpu_int8", 2, "share", over="first_audio/cpu_int8"
    ),
    Criterion("D6", "first_audio", "first_audio/cpu_int8", 0.25, "share", over="first_audio/eager"),
    Criterion("D7", "memory", "memory/cpu_int8", 2.2, "at most", unit=" GB"),
    Criterion("D7", "ready", "ready/cpu_int8", 30, "at most", unit=" s"),
)


def lines(figures: Figures, criteria: Sequence[Criterion] = CRITERIA) -> Iterator[str]:
    """A line for each criterion."""
    return (criterion.line(figures) for criterion in criteria)


def missed(figures: Figures, criteria: Sequence[Criterion] = CRITERIA) -> bool:
    """Whether a criterion that was measured is not met."""
    return any(criterion.met(figures) is False for criterion in criteria)
