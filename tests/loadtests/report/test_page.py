"""The report as text; that a browser draws it is a test of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.report import write_report
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.slo import Verdict, judge

Imagine = Callable[..., RunFolder]
LIMITS = Limits(each={"first_audio_p95": 0.5}, all={"errors": 0})
SCRIPTS = re.compile(r"<script.*?</script>", re.DOTALL)


def page_of(folder: RunFolder, verdict: Verdict, against: RunFolder | None = None) -> str:
    """Without scripts."""
    return SCRIPTS.sub("", write_report(folder, verdict, against).read_text())


def plots_of(page: str) -> list[str]:
    return re.findall(r'<div id="([\w-]+)" class="plotly', page)


def test_the_verdict_and_five_figures_come_first(imagine: Imagine) -> None:
    folder = imagine()
    page = page_of(folder, judge(folder, LIMITS))
    beginning = page[page.index("<body>") : page.index('class="plots"')]
    assert "Load test: limits kept" in beginning
    assert beginning.count('class="tile"') == 5
    assert len(plots_of(page)) == 10
    assert "steady" in page
    assert "vocoder" in page


def test_a_miss_is_said_with_its_reason_and_nothing_of_it_is_markup(imagine: Imagine) -> None:
    def fail(number: int, sample: Sample) -> Sample:
        return replace(sample, error="BadAnswerError", message="<script>") if number == 50 else sample

    folder = imagine(change=fail)
    page = page_of(folder, judge(folder, LIMITS))
    assert "limits missed" in page
    assert "BadAnswerError in long: &lt;script&gt;" in page
    assert '<tr class="missed">' in page


def test_nothing_is_fetched(imagine: Imagine) -> None:
    folder = imagine()
    page = page_of(folder, judge(folder, LIMITS))
    assert not re.findall(r"(?:src|href)=.?https?:", page)


def test_an_earlier_run_stands_beside(imagine: Imagine) -> None:
    before, folder = imagine("before"), imagine("now", wait=0.4)
    page = page_of(folder, judge(folder, LIMITS, before), before)
    assert "<br>before: " in page
    assert "Beside the earlier run" in page
    assert ">worse<" in page


def test_without_metrics_it_says_so_and_draws_the_rest(imagine: Imagine) -> None:
    folder = imagine(metrics=False)
    page = page_of(folder, judge(folder, LIMITS))
    assert "server: nobody answers" in page
    assert plots_of(page) == ["first-audio", "latency", "load", "throughput", "underruns", "memory", "cpu"]


@pytest.mark.parametrize("rate", [0.2])
def test_a_handful_of_requests_makes_a_page_too(rate: float, imagine: Imagine) -> None:
    folder = imagine(rate=rate)
    assert "limits kept" in page_of(folder, judge(folder, LIMITS))
