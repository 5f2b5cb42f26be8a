"""Figures, criteria, and the comparison of two runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cosytriton_bench.compare import changes, differences
from cosytriton_bench.criteria import CRITERIA, Criterion, lines, missed
from cosytriton_bench.errors import BenchError
from cosytriton_bench.measure import Figure, Figures, Stopwatch, in_turn
from cosytriton_bench.report import render_html, render_markdown, write_reports
from cosytriton_bench.results import Results, settings_of
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.families import COSYVOICE2

FAST = Criterion("D1", "step", "step/cpu", 3, "times", over="step/eager")


def results(figures: Figures) -> Results:
    row = {
        "case": "flow",
        "profile": "cpu",
        "fp32": 2e9,
        "int8": 0,
        "weight_bytes": 4e6,
        "weights": 1e6,
        "seconds": 0.5,
        "limit": 0.2,
        "reached": 0.4,
        "products": 0.75,
        "rest": [["Softmax", 0.25]],
    }
    settings = settings_of(Workload(COSYVOICE2), "a checkpoint", "a baseline")
    return Results({"cpu": "a CPU", "load": 0.1}, settings, figures, (row,), "today")


def seconds(*samples: float) -> Figure:
    return Figure("s", samples)


def test_variants_take_turns() -> None:
    order: list[str] = []

    def run(name: str) -> Stopwatch:
        order.append(name)
        return Stopwatch(float(len(order)), 2.0 * len(order))

    figures = in_turn("step", {name: partial(run, name) for name in ("eager", "cpu")}, 2)
    assert " ".join(order) == "eager cpu eager cpu"
    assert figures["step/cpu"].samples == (2.0, 4.0)
    assert figures["step:cpu/eager"].samples == (2.0, 6.0)


@pytest.mark.parametrize(("ours", "met"), [(0.5, True), (0.4, True), (0.6, False)])
def test_a_criterion_compares_medians(ours: float, met: bool) -> None:
    figures = {"step/eager": seconds(1.5, 9, 1), "step/cpu": seconds(ours)}
    assert FAST.met(figures) is met
    assert FAST.line(figures).startswith(f"D1 step {1.5 / ours:.3g}x (>= 3)")
    assert missed(figures, [FAST]) is not met


def test_what_was_not_measured_is_not_missed() -> None:
    assert all("not measured" in line for line in lines({}))
    assert not missed({})


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("first_audio", {"first_audio/cpu_int8": 2.0}, {"first_audio/cpu_int8": 3.0}),
        ("concurrent_8", {"rate_8/cpu_int8": 0.7}, {"rate_8/cpu_int8": 0.5}),
        ("memory", {"memory/cpu_int8": 2.1}, {"memory/cpu_int8": 2.3}),
        ("stream_cpu", {"long_stream:cpu/cpu_int8": 11.0}, {"long_stream:cpu/cpu_int8": 12.0}),
    ],
)
def test_limits_point_the_right_way(name: str, better: dict[str, float], worse: dict[str, float]) -> None:
    (criterion,) = [one for one in CRITERIA if one.name == name]
    others = {"first_audio/eager": 10.0, "rate/eager": 0.1, "long_unary:cpu/cpu_int8": 10.0}
    for given, met in ((better, True), (worse, False)):
        figures = {key: Figure("s", (number,)) for key, number in (others | given).items()}
        assert criterion.met(figures) is met


def test_only_what_is_beyond_the_noise_has_changed() -> None:
    before = results(
        {
            "a/cpu": seconds(1, 1.1, 0.9),
            "b/cpu": seconds(1, 1.6, 0.9),
            "c/cpu": seconds(1.0),
            "r/cpu": Figure("x", (8,)),
        }
    )
    now = results(
        {
            "a/cpu": seconds(1.5, 1.6, 1.4),
            "b/cpu": seconds(1.3),
            "c/cpu": seconds(1.05),
            "r/cpu": Figure("x", (16,)),
        }
    )
    worst, best = changes(before, now)
    assert str(worst) == "worse: a/cpu 1 -> 1.5 s (1.50 of before)"
    assert str(best).startswith("better: r/cpu 8 -> 16")
    assert str(changes(now, before)[0]).startswith("worse: r/cpu")


def test_other_settings_are_told() -> None:
    one = results({})
    settings = {**one.settings, "family": "cosyvoice3"}
    other = replace(one, settings=settings, machine={"cpu": "a CPU", "load": 3})
    assert list(differences(one, other)) == ["settings, family: cosyvoice2 before, cosyvoice3 now"]


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    given = results({"flow/eager": seconds(3, 2), "flow/cpu": seconds(1)})
    write_reports(given, tmp_path)
    assert Results.read(tmp_path / "results.json") == given


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', '{"format": 1}'])
def test_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=r"results\.json"):
        Results.read(path)


def test_both_pages_have_every_table() -> None:
    given = results(
        {"flow/eager": seconds(3), "flow/cpu": seconds(1), "flow:cpu/cpu": Figure("cpu s", (2.0,))}
    )
    markdown, html = render_markdown(given), render_html(given)
    assert "| flow | s | 3 | 1 (3.00x) |" in markdown
    assert "| flow | cpu | 2.00 | 4 | 200.00 | 500.00 | 40% | 75% | Softmax 25% |" in markdown
    for title in ("Limits", "Figures", "CPU seconds", "Roofline"):
        assert f"## {title}" in markdown
        assert f"<h2>{title}</h2>" in html
    assert "<svg" in html
    assert "http" not in html.replace("http-equiv", "")
