"""The report as one HTML page: light and dark, phone and print, nothing fetched, no scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources

from cosytriton_engines.quality.metrics import METRICS
from cosytriton_engines.report.charts import Bar, Point, bars, curve
from cosytriton_engines.report.markup import Markup, element, join, table
from cosytriton_engines.report.pictures import strip
from cosytriton_engines.report.report import (
    UNTRAINED,
    Report,
    StageReport,
    kept_by_reason,
    size_text,
    speed_text,
    verdict,
)
from cosytriton_ensemble.profiles import Precision

MOST_LAYERS = 20  # of a chart of sensitivity
_BELOW_DB = 10.0  # bars begin this far below the quietest layer that is shown

LOWER: tuple[Precision, ...] = ("fp16", "int8")  # precisions that have tolerances

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ABOUT: Mapping[str, str] = {
    "speaker_embedding": "The voice of a reference as one vector.",
    "audio_tokenizer": "A reference as speech tokens.",
    "prompt_mel": "A reference as a mel spectrum.",
    "text_encoder": "Text and speaker for the language model.",
    "speech_lm": "The language model: text to speech tokens.",
    "flow": "Speech tokens to a mel spectrum.",
    "tts_stream": "The flow, chunk by chunk.",
    "vocoder": "A mel spectrum to a waveform.",
}


def render_html(report: Report) -> str:
    """The whole page."""
    style = (
        resources.files("cosytriton_engines.report")
        .joinpath("templates/report.css")
        .read_text(encoding="utf-8")
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"Precision report: {report.checkpoint}"),
        element("style", Markup(style)),
    )
    sections = (_model(model, stages) for model, stages in report.models.items())
    body = element("body", element("main", _header(report), _overview(report), *sections, _reading(report)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _header(report: Report) -> Markup:
    remarks = [element("p", UNTRAINED)] if report.untrained else []
    remarks += [element("p", f"Calibration set: {warning}") for warning in report.warnings]
    facts = (join(element("dt", title), element("dd", text)) for title, text in report.facts)
    return element(
        "header",
        element("p", "Precision report", class_="kicker"),
        element("h1", report.checkpoint),
        element("p", report.summary, class_="lead"),
        *([element("aside", *remarks, class_="note", aria_label="Remarks")] if remarks else []),
        element("dl", *facts),
    )


def _overview(report: Report) -> Markup:
    head = ("model", "verdict", "variant", "MB", "of FP32", "CPU speed", "judged by", "figure", "allowed")
    rows = []
    for stage in report.stages:
        metric = stage.judged
        _, figure, limit, _ = stage.cells(metric)
        link = element("a", stage.model, href=f"#{stage.model}")
        passed = _mark(verdict(not stage.failures))
        sizes = (size_text(stage.megabytes), f"{stage.size_ratio:.0%}", speed_text(stage.speed_ratio))
        rows.append((link, passed, _artifact(stage), *sizes, metric.title, figure, limit))
    caption = "Every variant. CPU speed: how many times as fast as FP32 on this machine."
    return join(
        table(head, rows, frozenset({3, 4, 5, 7, 8}), caption),
        element("div", *(_sizes(model, stages) for model, stages in report.models.items()), class_="charts"),
    )


def _artifact(stage: StageReport) -> str:
    """The file without what all of them share: "fp16.onnx", "qdq.onnx"."""
    return stage.artifact.removeprefix("model.")


def _mark(text: str) -> Markup:
    return element("span", text, class_="fail" if text == verdict(False) else None)


def _sizes(model: str, stages: Sequence[StageReport]) -> Markup:
    whole = stages[0].fp32_megabytes
    largest = max(whole, *(stage.megabytes for stage in stages))
    rows = [Bar("fp32", whole / largest, f"{size_text(whole)} MB", "fp32")]
    rows += [
        Bar(
            _artifact(stage),
            stage.megabytes / largest,
            f"{size_text(stage.megabytes)} MB, {stage.size_ratio:.0%}",
            stage.precision,
        )
        for stage in stages
    ]
    return bars(f"Size of {model}", rows)


def _model(model: str, stages: Sequence[StageReport]) -> Markup:
    return element(
        "section",
        element("h2", model),
        element("p", _ABOUT.get(model, ""), class_="muted"),
        *(_variant(stage) for stage in stages),
        id=model,
    )


def _variant(stage: StageReport) -> Markup:
    parts = [f"{size_text(stage.megabytes)} MB, {stage.size_ratio:.0%} of FP32"]
    if stage.speed_ratio is not None:
        parts.append(f"{speed_text(stage.speed_ratio)} the speed of FP32 on this CPU")
    rows = [_row(metric.title, *stage.cells(metric)) for metric in stage.metrics]
    drawn = [*_search(stage), *_sensitivity(stage)]
    return join(
        element("h3", f"{stage.precision} ", element("code", stage.artifact)),
        element("p", "; ".join(parts) + ".", class_="muted"),
        table(
            ("metric", "verdict", "figure", "allowed", "FP32 with itself"),
            rows,
            frozenset({2, 3, 4}),
            f"{stage.model} {stage.precision} against FP32",
        ),
        _kept(stage),
        *([element("div", *drawn, class_="charts")] if drawn else []),
        *([strip(stage.picture)] if stage.picture is not None else []),
    )


def _row(title: str, mark: str, *figures: str) -> tuple[str, ...]:
    return title, _mark(mark), *figures


def _kept(stage: StageReport) -> Markup:
    if not stage.kept:
        return element("p", "No layer is kept in higher precision.", class_="muted")
    count = len(stage.kept)
    groups = []
    for reason, layers in kept_by_reason(stage.kept).items():
        items = (element("li", element("code", layer)) for layer in layers)
        groups.append(join(element("p", f"{reason}:"), element("ul", *items)))
    title = f"{count} layer{'s are' if count > 1 else ' is'} kept in higher precision"
    return element("details", element("summary", title), *groups, open="" if count <= MOST_LAYERS else None)


def _search(stage: StageReport) -> list[Markup]:
    """The curve of the last judged metric, the most continuous one, over the layers that were kept."""
    metric = [m for m in METRICS[stage.model] if stage.precision in m.tolerance][-1]
    trials = [trial for trial in stage.trials if metric.name in trial.figures]
    if len(trials) < 2:
        return []
    points = [
        Point(trial.kept, trial.figures[metric.name], metric.text(trial.figures[metric.name]), trial.passed)
        for trial in trials
    ]
    limit = metric.tolerance[stage.precision]
    title = f"{metric.title} over the layers kept; dashed: the {metric.text(limit)} allowed; filled: all pass"
    return [curve(title, points, "layers kept", limit)]


def _sensitivity(stage: StageReport) -> list[Markup]:
    """Bars of the noise in dB below the signal; what overflows is beyond all others."""
    if not stage.sensitivity:
        return []
    ranked = sorted(stage.sensitivity.items(), key=lambda item: (-item[1], item[0]))[:MOST_LAYERS]
    levels = {name: 10 * math.log10(max(ratio, 1e-20)) for name, ratio in ranked if math.isfinite(ratio)}
    low = min(levels.values(), default=0.0) - _BELOW_DB
    high = max(levels.values(), default=0.0)
    rows = []
    for name, _ in ranked:
        level = levels.get(name)
        share = 1.0 if level is None else (level - low) / (high - low)
        text = "overflows" if level is None else f"{level:.1f} dB"
        kept = name in stage.kept
        rows.append(Bar(name, share, f"kept {text}" if kept else text, "fp32" if kept else stage.precision))
    return [bars("Noise that each layer alone adds to what it computes; the loudest first", rows)]


def _reading(report: Report) -> Markup:
    rows = []
    for model in report.models:
        for metric in METRICS[model]:
            sign = "≥" if metric.better == "higher" else "≤"
            limits = (
                f"{sign} {metric.text(metric.tolerance[p])}" if p in metric.tolerance else "-" for p in LOWER
            )
            rows.append((f"{model}: {metric.title}", *limits, metric.reason))
    return element(
        "section",
        element("h2", "What the figures mean"),
        element(
            "p",
            "Each figure compares a variant with the FP32 graph on the calibration set, over valid frames, "
            "samples and rows alone. “FP32 with itself” is the same graph with other threads and rows in "
            "another order: no variant can be told from FP32 below that.",
        ),
        table(("metric", *LOWER, "reason"), rows, frozenset({1, 2}), "Tolerances and their reasons"),
        class_="prose",
    )
