"""The report in a real browser without a screen. Debian's `chromium`; `make loadtest` installs it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.report import write_report
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.slo import judge

pytestmark = pytest.mark.loadtest
Imagine = Callable[..., RunFolder]
CONSOLE = re.compile(r"CONSOLE[:(].*")
MILLISECONDS = 10_000  # of the page's own time


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """The document when all scripts have run, and what they said on the console."""
    browser = shutil.which("chromium")
    assert browser, "apt-get install chromium"
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *(f"--virtual-time-budget={MILLISECONDS}", f"--user-data-dir={page.parent / 'browser'}"),
        *("--window-size=1280,2200", "--hide-scrollbars"),
        *(*options, page.resolve().as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, CONSOLE.findall(done.stderr)


class Drawings(HTMLParser):
    """How many curves, bars and points each plot of the page has drawn."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.marks: dict[str, int] = {}
        self.feed(document)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        classes = given.get("class", "").split()
        if tag == "div" and "plotly-graph-div" in classes:
            self.plot = given["id"]
            self.marks[self.plot] = 0
        elif {"js-line", "point"} & set(classes):
            self.marks[self.plot] += 1


def test_every_plot_is_drawn_and_the_console_is_silent(imagine: Imagine) -> None:
    folder = imagine()
    document, console = browse(write_report(folder, judge(folder, Limits(all={"errors": 0}))), "--dump-dom")
    assert console == []
    marks = Drawings(document).marks
    assert len(marks) == 10
    assert all(marks.values()), marks
    assert document.count('class="main-svg"') >= 10


def test_a_plot_that_cannot_be_drawn_is_noticed(imagine: Imagine) -> None:
    folder = imagine()
    report = write_report(folder, judge(folder, Limits(all={"errors": 0})))
    page = report.read_text()
    report.write_text(page.replace('Plotly.newPlot(                        "cpu"', 'Plotly.newPlot("none"'))
    assert report.read_text() != page
    document, console = browse(report, "--dump-dom")
    assert console
    assert Drawings(document).marks["cpu"] == 0


def test_a_picture_of_it(imagine: Imagine) -> None:
    folder = imagine()
    report = write_report(folder, judge(folder, Limits(all={"errors": 0})))
    picture = folder.path / "report.png"
    browse(report, f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000  # an empty page has less
