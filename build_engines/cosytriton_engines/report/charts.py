"""Charts as inline SVG: bars and a curve.

Places are percentages of the width and pixels of the height, so that a chart fills a phone or a wide screen
while its text keeps its size. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cosytriton_engines.report.markup import Markup, element

_ROW = 34  # pixels of a bar with its text
_BAR = 8
_LABEL = 33  # characters of the label of a bar
_HEIGHT, _TOP, _BOTTOM, _AXIS = 190, 12, 155, 165  # pixels of a curve, of its highest and lowest value, axis
_LEFT, _RIGHT = 4, 96  # per cent of the width: the first and the last point of a curve
_DECADES = 20.0  # a positive range beyond this ratio is drawn logarithmically


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a label, the share of the full width from 0 to 1, its value in words, and a colour class."""

    label: str
    share: float
    text: str
    kind: str


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Horizontal bars, each under its label and its value."""
    shapes = []
    for index, bar in enumerate(rows):
        y = index * _ROW
        width = 100 * min(max(bar.share, 0.005), 1.0)
        shapes += [
            element("text", _short(bar.label), element("title", bar.label), x=0, y=y + 14),
            element("text", bar.text, x="100%", y=y + 14, text_anchor="end", class_="value"),
            element("rect", x=0, y=y + 20, width="100%", height=_BAR, class_="track"),
            element("rect", x=0, y=y + 20, width=f"{width:.1f}%", height=_BAR, class_=bar.kind),
        ]
    spoken = f"{title}: " + "; ".join(f"{bar.label} {bar.text}" for bar in rows)
    return _figure(title, spoken, len(rows) * _ROW, shapes)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve: its place, its value in words, and whether it is within the tolerance."""

    x: float
    y: float
    text: str
    good: bool


def curve(title: str, points: Sequence[Point], x_title: str, limit: float) -> Markup:
    """A line through points, full ones within the tolerance and hollow ones beyond; the limit is dashed.

    Places on the x axis are logarithmic and begin at 0, as numbers that double are.
    """
    heights = [*(point.y for point in points), limit]
    if min(heights) > 0 and max(heights) / min(heights) > _DECADES:
        heights = [math.log10(height) for height in heights]
    *ys, limit_y = _spread(heights, _BOTTOM, _TOP)
    xs = _spread([math.log1p(point.x) for point in points], _LEFT, _RIGHT)
    lines = [(0.0, _AXIS, 100.0, _AXIS, "axis"), (0.0, limit_y, 100.0, limit_y, "limit")]
    lines += [(x1, y1, x2, y2, "curve") for (x1, y1), (x2, y2) in pairwise(zip(xs, ys, strict=True))]
    shapes = [_line(*line) for line in lines]
    for x, y, point in zip(xs, ys, points, strict=True):
        tip = element("title", f"{point.x:g} {x_title}: {point.text}")
        kind = "point good" if point.good else "point"
        dot = element("circle", tip, cx=f"{x:.1f}%", cy=f"{y:.1f}", r=4.5, class_=kind)
        shapes.append(dot)
    spoken = f"{title}: " + "; ".join(f"{p.x:g} {x_title}, {p.text}" for p in points)
    return _figure(title, spoken, _HEIGHT, [*shapes, *_ends(points, x_title)])


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=f"{x1:.1f}%", y1=f"{y1:.1f}", x2=f"{x2:.1f}%", y2=f"{y2:.1f}", class_=kind)


def _ends(points: Sequence[Point], x_title: str) -> list[Markup]:
    """Words below the axis: what lies at its ends."""
    first, last = (f"{point.x:g}: {point.text}" for point in (points[0], points[-1]))
    places = (("0", "start", first), ("50%", "middle", x_title), ("100%", "end", last))
    return [
        element("text", text, x=x, y=_HEIGHT - 6, text_anchor=anchor, class_="muted")
        for x, anchor, text in places
    ]


def _spread(values: Sequence[float], low: float, high: float) -> list[float]:
    """Map values onto [low, high]; equal ones lie in the middle."""
    smallest, span = min(values), max(values) - min(values)
    return [low + (high - low) * ((value - smallest) / span if span else 0.5) for value in values]


def _short(label: str) -> str:
    """A label that leaves room for its value on a phone: of a long one the end, which tells layers apart."""
    return label if len(label) <= _LABEL else f"…{label[1 - _LABEL :]}"


def _figure(title: str, spoken: str, height: int, shapes: Sequence[Markup]) -> Markup:
    drawing = element("svg", *shapes, role="img", aria_label=spoken, width="100%", height=height)
    return element("figure", element("figcaption", title), drawing)
