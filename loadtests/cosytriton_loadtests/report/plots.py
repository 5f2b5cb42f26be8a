"""Plots of a run: one function a picture; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from cosytriton_ensemble.metrics import METRICS
from cosytriton_loadtests import causes
from cosytriton_loadtests import server_figures as server
from cosytriton_loadtests.playback import worst_underrun
from cosytriton_loadtests.run_folder import RunInfo
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.server_figures import Series
from cosytriton_loadtests.server_watch import Look

MOST_POINTS = 3000  # of a cloud; more make a page slow and no clearer
BINS = 40  # parts of a run, over which a rate or a percentile is taken
LEAST_BIN, LEAST_LOAD_BIN = 1.0, 5.0  # seconds of such a part; over a shorter one a load says little
COLOURS = qualitative.Safe
UNDERRUNS = {"none": 0.0, "up to 100 ms": 0.1, "up to 500 ms": 0.5, "longer": np.inf}  # upper ends, seconds
UNDERRUN_COLOURS = ("#2e9e5b", "#b9d66b", "#f0a942", "#d1495b")
HEIGHT = 340  # pixels


@dataclass(frozen=True, slots=True)
class Run:
    """What is drawn of one run; times of its pictures are seconds since `start`."""

    info: RunInfo
    samples: Sequence[Sample]
    looks: Sequence[Look]

    @property
    def start(self) -> float:
        """When the load began, seconds since the epoch."""
        return self.info.stages[0].start if self.info.stages else min(one.intended for one in self.samples)

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer."""
        return max(one.ended for one in self.samples) - self.start

    def scenarios(self) -> dict[str, list[Sample]]:
        """Requests of each scenario."""
        found: dict[str, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.scenario, []).append(sample)
        return dict(sorted(found.items()))

    def bins(self, least: float = LEAST_BIN) -> tuple[npt.NDArray[np.float64], float]:
        """Where the parts of the run begin, and how long they are."""
        width = max(least, self.seconds / BINS)
        return np.arange(0, self.seconds + width, width), width


def first_audio(run: Run, against: Run | None = None) -> go.Figure | None:
    """Share of requests that were heard within a time, a line for each scenario; an earlier run is dotted."""
    figure = go.Figure()
    for one, dash in ((run, "solid"), (against, "dot")):
        for (name, samples), colour in zip(
            one.scenarios().items() if one else (), cycle(COLOURS), strict=False
        ):
            waits = np.sort([wait for sample in samples if (wait := sample.first_audio) is not None])
            if len(waits):
                shares = np.arange(1, len(waits) + 1) / len(waits)
                label = name if one is run else f"{name}, before"
                line = {"dash": dash, "color": colour, "shape": "hv"}
                figure.add_scatter(x=waits, y=shares, mode="lines", name=label, line=line)
    figure.update_xaxes(title="seconds until the first audio", rangemode="tozero")
    figure.update_yaxes(title="share of requests", tickformat=".0%", range=(0, 1.02))
    return _drawn(figure)


def latency_over_time(run: Run) -> go.Figure | None:
    """First audio of each request at its intended time; failed ones as crosses where they ended."""
    figure = go.Figure()
    for (name, samples), colour in zip(run.scenarios().items(), cycle(COLOURS), strict=False):
        shown = samples[:: 1 + len(samples) // MOST_POINTS]
        heard = [
            (s.intended - run.start, wait)
            for s in shown
            if (wait := s.first_audio) is not None and not s.error
        ]
        failed = [(s.intended - run.start, s.ended - s.intended) for s in samples if s.error]
        for points, label, symbol in ((heard, name, "circle"), (failed, f"{name}, failed", "x")):
            if points:
                x, y = zip(*points, strict=True)
                marker = {"color": colour, "symbol": symbol, "size": 6, "opacity": 0.7}
                figure.add_scatter(x=x, y=y, mode="markers", name=label, marker=marker)
    figure.update_yaxes(title="seconds until the first audio", rangemode="tozero")
    return _over_time(figure, run)


def latency_over_load(run: Run) -> go.Figure | None:
    """Percentiles of first audio over the rate of requests that were due, a point for each part."""
    starts, width = run.bins(LEAST_LOAD_BIN)
    waits = [(s.intended - run.start, wait) for s in run.samples if (wait := s.first_audio) is not None]
    due = np.array([s.intended - run.start for s in run.samples])
    figure = go.Figure()
    for percent, colour in zip((50, 95), COLOURS, strict=False):
        points = []
        for start in starts:
            inside = [wait for at, wait in waits if start <= at < start + width]
            if inside:
                rate = float(np.mean((due >= start) & (due < start + width)) * len(due) / width)
                points.append((rate, float(np.percentile(inside, percent))))
        if points:
            x, y = zip(*sorted(points), strict=True)
            figure.add_scatter(
                x=x, y=y, mode="markers", name=f"p{percent}", marker={"color": colour, "size": 8}
            )
    figure.update_xaxes(title="requests a second that were due", rangemode="tozero")
    figure.update_yaxes(title="seconds until the first audio", rangemode="tozero")
    return _drawn(figure)


def throughput(run: Run) -> go.Figure | None:
    """Requests that were due, answered and failed in a second; seconds of speech in a second."""
    starts, width = run.bins()
    edges = np.append(starts, starts[-1] + width)
    lines = {
        "due": [(s.intended, 1.0) for s in run.samples],
        "answered": [(s.ended, 1.0) for s in run.samples if not s.error],
        "failed": [(s.ended, 1.0) for s in run.samples if s.error],
        "speech": [(chunk.at, chunk.seconds) for s in run.samples for chunk in s.chunks],
    }
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    for (name, events), colour in zip(lines.items(), COLOURS, strict=False):
        if events:
            at, weights = zip(*events, strict=True)
            counts, _ = np.histogram(np.array(at) - run.start, edges, weights=weights)
            line = {"color": colour, "dash": "dot" if name == "speech" else "solid"}
            figure.add_scatter(x=starts, y=counts / width, name=name, line=line, secondary_y=name == "speech")
    figure.update_yaxes(title="requests a second", rangemode="tozero")
    figure.update_yaxes(title="seconds of speech a second", showgrid=False, secondary_y=True)
    return _over_time(figure, run)


def queue_and_batch(run: Run) -> go.Figure | None:
    """Seconds that a request waits in the queue of each model, and how many are computed at once."""
    queues = server.rates(run.looks, server.QUEUE, server.COUNT)
    batches = server.rates(run.looks, server.COUNT, server.EXECUTIONS)
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    computing = causes.work_of(run.looks).keys()
    for row, found in enumerate((queues, batches), 1):
        shown = {model: series for model, series in found.items() if model in computing}
        _add_lines(figure, shown, run, row=row, col=1, showlegend=row == 1)
    figure.update_yaxes(title="seconds in the queue", rangemode="tozero", row=1)
    figure.update_yaxes(title="mean batch", rangemode="tozero", row=2)
    return _over_time(figure, run, height=HEIGHT + 140, rows=2)


def server_time(run: Run, against: Run | None = None) -> go.Figure | None:
    """Milliseconds a request in each model: queue and compute, and those of an earlier run."""
    figure = go.Figure()
    for one, suffix in ((run, ""), (against, ", before")):
        loads = causes.work_of(one.looks) if one else {}
        for what, colour in zip(("compute", "queue"), COLOURS, strict=False):
            times = [load.each(getattr(load, what)) * 1e3 for load in loads.values()]
            if times:
                marker = {"color": colour, "opacity": 0.4 if suffix else 1.0}
                figure.add_bar(
                    y=list(loads),
                    x=times,
                    name=what + suffix,
                    orientation="h",
                    marker=marker,
                    offsetgroup=suffix,
                )
    figure.update_layout(barmode="relative")
    figure.update_xaxes(title="milliseconds a request")
    return _drawn(figure)


def underruns(run: Run) -> go.Figure | None:
    """Shares of the streams by their longest interruption."""
    streams = {
        name: [worst_underrun(sample) for sample in samples if sample.chunks and "stream" in sample.protocol]
        for name, samples in run.scenarios().items()
    }
    streams = {name: found for name, found in streams.items() if found}
    figure, lower = go.Figure(), -np.inf
    for (label, upper), colour in zip(UNDERRUNS.items(), UNDERRUN_COLOURS, strict=True):
        shares = [np.mean([lower < one <= upper for one in found]) for found in streams.values()]
        figure.add_bar(y=list(streams), x=shares, name=label, orientation="h", marker={"color": colour})
        lower = upper
    figure.update_layout(barmode="stack")
    figure.update_xaxes(
        title="share of streams by their longest interruption", tickformat=".0%", range=(0, 1)
    )
    return _drawn(figure) if streams else None


def pending(run: Run) -> go.Figure | None:
    """Requests that wait or are in work, and what else the server's own gauges say."""
    figure = go.Figure()
    own = [metric.name for metric in METRICS if metric.kind == "gauge" and metric.unit == "requests"]
    for name in (server.PENDING, *own):
        short = "waiting" if name == server.PENDING else name.removeprefix("cosytriton_")
        found = server.gauges(run.looks, name)
        _add_lines(figure, {f"{model}: {short}": one for model, one in found.items() if any(one[1])}, run)
    figure.update_yaxes(title="requests", rangemode="tozero")
    return _over_time(figure, run)


def memory(run: Run) -> go.Figure | None:
    """Resident memory of each process of the server."""
    figure = go.Figure()
    _add_lines(figure, server.memory(run.looks), run, scale=1e-6)
    figure.update_yaxes(title="resident MB", rangemode="tozero")
    return _over_time(figure, run)


def cpu(run: Run) -> go.Figure | None:
    """Cores that each process of the server keeps busy."""
    figure = go.Figure()
    _add_lines(figure, server.cpu(run.looks), run, stackgroup="cores")
    figure.update_yaxes(title="cores", rangemode="tozero")
    return _over_time(figure, run)


def gpu(run: Run) -> go.Figure | None:
    """Memory and use of each GPU."""
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    _add_lines(figure, server.gauges(run.looks, server.GPU_MEMORY), run, scale=1e-9, secondary_y=False)
    _add_lines(figure, server.gauges(run.looks, server.GPU_USE), run, secondary_y=True)
    figure.update_yaxes(title="GB", rangemode="tozero")
    figure.update_yaxes(title="share of the time in use", tickformat=".0%", showgrid=False, secondary_y=True)
    return _over_time(figure, run)


def _add_lines(
    figure: go.Figure, found: Mapping[str, Series], run: Run, scale: float = 1.0, **options: object
) -> None:
    """A line for each name."""
    for (name, (times, values)), colour in zip(sorted(found.items()), cycle(COLOURS), strict=False):
        x, y = np.array(times) - run.start, np.array(values) * scale
        figure.add_scatter(
            x=x, y=y, name=name, mode="lines", line={"color": colour}, legendgroup=name, **options
        )


def _over_time(figure: go.Figure, run: Run, rows: int = 1, **layout: object) -> go.Figure | None:
    """With the stages and the warm-up marked."""
    if not figure.data:
        return None
    figure.update_xaxes(title="seconds", row=rows if rows > 1 else None)
    figure.add_vrect(x0=0, x1=run.info.warm_up, fillcolor="grey", opacity=0.12, line_width=0)
    for stage in run.info.stages[1:]:
        figure.add_vline(
            x=stage.start - run.start, line_dash="dash", line_color="grey", annotation_text=stage.name
        )
    return _drawn(figure, **layout)


def _drawn(figure: go.Figure, **layout: object) -> go.Figure | None:
    """In the style of the page, or None when nothing is in it."""
    if not figure.data:
        return None
    margin = {"l": 60, "r": 20, "t": 50, "b": 50}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    style = {"template": "plotly_white", "height": HEIGHT, "margin": margin, "legend": legend}
    figure.update_layout(**style | layout)
    return figure
