"""The report as Markdown: the tables without the charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cosytriton_engines.report.report import (
    UNTRAINED,
    Report,
    StageReport,
    kept_by_reason,
    size_text,
    speed_text,
    verdict,
)


def render_markdown(report: Report) -> str:
    """The whole page."""
    remarks = [UNTRAINED] if report.untrained else []
    remarks += [f"Calibration set: {warning}" for warning in report.warnings]
    blocks = [
        f"# Precision report: {_plain(report.checkpoint)}",
        _plain(report.summary),
        *(f"> {_plain(remark)}" for remark in remarks),
        "\n".join(f"- {title}: {_plain(text)}" for title, text in report.facts),
        _table(("model", "variant", "MB", "of FP32", "CPU speed", "verdict"), map(_line, report.stages)),
    ]
    for model, stages in report.models.items():
        blocks += [f"## {model}", *(block for stage in stages for block in _variant(stage))]
    return "\n\n".join(blocks) + "\n"


def _line(stage: StageReport) -> tuple[str, ...]:
    return (
        stage.model,
        f"{stage.precision} `{stage.artifact}`",
        size_text(stage.megabytes),
        f"{stage.size_ratio:.0%}",
        speed_text(stage.speed_ratio),
        verdict(not stage.failures),
    )


def _variant(stage: StageReport) -> list[str]:
    rows = ((metric.title, *stage.cells(metric)) for metric in stage.metrics)
    blocks = [
        f"### {stage.precision} `{stage.artifact}`",
        _table(("metric", "verdict", "figure", "allowed", "FP32 with itself"), rows),
    ]
    if stage.kept:
        groups = kept_by_reason(stage.kept).items()
        lines = (
            f"- {_plain(reason)}: {', '.join(f'`{layer}`' for layer in layers)}" for reason, layers in groups
        )
        blocks.append("Kept in higher precision:\n\n" + "\n".join(lines))
    return blocks


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown does not take for markup, but for code."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
