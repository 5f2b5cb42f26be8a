"""Writes the page of a run, alone or beside an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from cosytriton_loadtests import causes, statistics
from cosytriton_loadtests.compare import Change, changes
from cosytriton_loadtests.report import plots
from cosytriton_loadtests.report.plots import Run
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.server_watch import read_looks
from cosytriton_loadtests.slo import Verdict, warm_looks
from cosytriton_loadtests.statistics import Summary

TILES = (  # measure, what it is, how it is written
    ("first_audio_p95", "first audio, p95", "{:.2f} s"),
    ("c100", "no underrun over 100 ms", "{:.1%}"),
    ("rtf_p95", "real-time factor, p95", "{:.2f}"),
    ("audio_rate", "seconds of speech a second", "{:.1f}"),
    ("errors", "failed", "{:.1%}"),
)
COLUMNS = (
    *("requests", "failed", "first_audio_p50", "first_audio_p90", "first_audio_p95", "first_audio_p99"),
    *("first_audio_max", "first_audible_p95", "gap_p95", "worst_underrun_max", "c100", "rtf_p50", "rtf_p95"),
    *("answers_rate", "audio_rate", "goodput"),
)
MACHINE = {"cores": "cores", "memory_gb": "GB of memory"}  # of the load generator
Rows = Sequence[Sequence[str]]


def write_report(folder: RunFolder, verdict: Verdict, against: RunFolder | None = None) -> Path:
    """Write `report.html` into the folder.

    Raises:
        LoadTestError: a folder holds no run, or no requests behind the warm-up.
    """
    files = resources.files(__package__)
    summaries = statistics.of_run(folder)
    before = statistics.of_run(against)[0] if against else None
    page = Template(files.joinpath("page.html").read_text("utf-8")).substitute(
        title=f"Load test: limits {'kept' if verdict.passed else 'missed'}",
        outcome="kept" if verdict.passed else "missed",
        reason=escape(verdict.reason),
        style=files.joinpath("report.css").read_text("utf-8"),
        plotly=get_plotlyjs(),
        tiles="".join(_tiles(summaries[0], before)),
        facts=escape(_facts(folder)),
        sections="".join(_sections(folder, verdict, summaries, against)),
    )
    folder.report_file.write_text(page, encoding="utf-8")
    return folder.report_file


def _tiles(summary: Summary, before: Summary | None) -> Iterator[str]:
    for measure, meaning, style in TILES:
        value, former = summary.value(measure), before and before.value(measure)
        earlier = f"<br>before: {style.format(former)}" if former is not None else ""
        figure = "-" if value is None else style.format(value)
        yield f'<div class="tile"><b>{figure}</b><span>{meaning}{earlier}</span></div>'


def _facts(folder: RunFolder) -> str:
    info = folder.info()
    problem = next((look.problem for look in read_looks(folder.server_file) if look.problem), "")
    facts = [info.url, f"{info.loop} loop", f"warm-up {info.warm_up:g} s, no part of the figures"]
    facts += [f"{info.machine[key]} {unit}" for key, unit in MACHINE.items() if key in info.machine]
    return " · ".join([*facts, *([f"server: {problem}"] if problem else ())])


def _sections(
    folder: RunFolder, verdict: Verdict, summaries: Sequence[Summary], against: RunFolder | None
) -> Iterator[str]:
    yield f'<div class="plots">{"".join(_plots(folder, against))}</div>'
    marks = {True: "kept", False: "missed", None: "not measured"}
    limits = [
        (row.measure, row.place or "run", row.figure, row.allowed, marks[row.met]) for row in verdict.rows
    ]
    yield _table("Limits", ("measure", "of", "measured", "allowed", ""), limits)
    if against:
        yield _table(
            "Beside the earlier run", Change.HEAD, [change.cells for change in changes(against, folder)]
        )
    rows = [(summary.place, *(_cell(summary.value(column)) for column in COLUMNS)) for summary in summaries]
    yield _table("Scenarios and stages", ("", *(column.replace("_", " ") for column in COLUMNS)), rows)
    yield _table("Models of the server", ("model", *_MODEL_COLUMNS), _models(folder, against))


_MODEL_COLUMNS = (
    "requests",
    "mean batch",
    "queue ms",
    "compute ms",
    "share of the time",
    "cache hits",
    "misses",
)


def _models(folder: RunFolder, against: RunFolder | None) -> Rows:
    held = causes.holdings(warm_looks(folder), warm_looks(against) if against else [])
    return [
        (
            one.load.model,
            *(_cell(value) for value in (one.load.requests, one.load.batch)),
            *(f"{one.load.each(seconds) * 1e3:.3g}" for seconds in (one.load.queue, one.load.compute)),
            f"{one.share:.0%}",
            *(_cell(value) for value in (one.load.hits, one.load.misses)),
        )
        for one in held
    ]


def _plots(folder: RunFolder, against: RunFolder | None) -> Iterator[str]:
    run, before = _drawn(folder), _drawn(against) if against else None
    for name, title, figure in (
        ("first-audio", "First audio", plots.first_audio(run, before)),
        ("latency", "First audio over time", plots.latency_over_time(run)),
        ("load", "First audio over load", plots.latency_over_load(run)),
        ("throughput", "Throughput", plots.throughput(run)),
        ("underruns", "Underruns", plots.underruns(run)),
        ("server-time", "Time in each model", plots.server_time(run, before)),
        ("queue", "Queue and batch of each model", plots.queue_and_batch(run)),
        ("pending", "Requests at the server", plots.pending(run)),
        ("memory", "Memory of the server", plots.memory(run)),
        ("cpu", "CPU of the server", plots.cpu(run)),
        ("gpu", "GPU of the server", plots.gpu(run)),
    ):
        if figure is not None:
            yield f"<section><h2>{title}</h2>{_picture(figure, name)}</section>"


def _drawn(folder: RunFolder) -> Run:
    """All of a run, its warm-up included."""
    return Run(folder.info(), list(folder.samples(warm=False)), read_looks(folder.server_file))


def _picture(figure: go.Figure, name: str) -> str:
    config = {"displayModeBar": False, "responsive": True}
    return str(figure.to_html(config, full_html=False, include_plotlyjs=False, div_id=name))


def _table(title: str, head: Sequence[str], rows: Rows) -> str:
    if not rows:
        return ""
    lines = "".join(
        f'<tr class="{"missed" if "missed" in row else ""}">{_cells("td", row)}</tr>' for row in rows
    )
    return f"<section><h2>{title}</h2><table><tr>{_cells('th', head)}</tr>{lines}</table></section>"


def _cells(kind: str, values: Sequence[str]) -> str:
    return "".join(f"<{kind}>{escape(value)}</{kind}>" for value in values)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
