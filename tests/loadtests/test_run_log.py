from __future__ import annotations

import time
from pathlib import Path

import pytest

from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.run_log import RunLog, Told
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.shapes import Planned

INFO = RunInfo("here", "", "open", 0.0, ())


def sample(intended: float) -> Sample:
    return Sample("en", "", "grpc", {}, intended, intended, intended + 1)


def test_samples_get_the_stage_in_which_they_were_intended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    log = RunLog(folder, lambda: Told(INFO, interval=0.5))
    begin = time.time() - 100
    log.stage_began(Planned("before", 40, 4), begin)
    log.stage_began(Planned("before", 40, 4), begin + 1)  # as Locust's master does
    log.stage_began(Planned("spike", 20, 12), begin + 50)
    log.write([sample(begin + at) for at in (-1, 0, 49, 50, 99)])
    log.ended()
    assert [one.stage for one in folder.samples(warm=False)] == [*["before"] * 3, *["spike"] * 2]
    first, second = folder.info().stages
    assert (first.start, first.seconds, first.users, first.rate) == (begin, 50, 4, 8)
    assert second.seconds == pytest.approx(50, abs=0.5)  # until it ended, not as planned
    assert folder.info().warm_up == pytest.approx(10, abs=0.1)


def test_the_next_run_replaces_the_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = RunLog(folder, lambda: Told(INFO, warm_up=3.0))
    for name in ("one", "two"):
        now = time.time()
        log.stage_began(Planned(name, 40, 4), now)
        log.write([sample(now)])
        log.ended()
    assert [one.stage for one in folder.samples(warm=False)] == ["two"]
    assert [stage.name for stage in folder.info().stages] == ["two"]
    assert folder.info().warm_up == 3
    assert folder.info().stages[0].rate is None


def test_nothing_is_written_without_a_folder() -> None:
    log = RunLog(None, lambda: Told(INFO))
    log.stage_began(Planned("one", 40, 4), 0.0)
    log.write([sample(0.0)])
    log.ended()
