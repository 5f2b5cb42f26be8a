"""The search for the highest rate, on servers of which the answer is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cosytriton_loadtests.capacity import Bracket, Capacity, CapacityOptions, find_capacity, search
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.run import LoadOptions
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.slo import Row, Verdict


class Server:
    """Whose first audio is 1 s / (limit - rate) of an M/M/1 queue, with luck that a test gives it."""

    def __init__(self, most: float, luck: Callable[[], float] = lambda: 1.0) -> None:
        self.most, self.luck, self.asked = most, luck, list[LoadOptions]()

    def run(self, options: LoadOptions, folder: Path) -> RunFolder:
        self.asked.append(options)
        return RunFolder(folder)

    def judge(self, _: RunFolder, limits: Limits) -> Verdict:
        rate = self.asked[-1].rate
        assert rate is not None
        wait = self.luck() / (self.most - rate) if rate < self.most else 1e6
        row = Row("first_audio_p95", "", wait, limits.all["first_audio_p95"])
        return Verdict(bool(row.met), str(row), (row,))

    def capacity(self, folder: Path, start: float = 1.0, **options: float) -> Capacity:
        chosen = CapacityOptions(Bracket(start), **options)  # type: ignore[arg-type]
        folder.mkdir(exist_ok=True)
        limits = Limits({"first_audio_p95": 1.0})
        return find_capacity(LoadOptions(), limits, folder, chosen, run=self.run, judge=self.judge)


@pytest.mark.parametrize("start", [0.3, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("most", [2.0, 7.9, 60.0])
def test_the_rate_is_found_within_a_tenth(most: float, start: float, tmp_path: Path) -> None:
    found = Server(most).capacity(tmp_path, start)
    exact = most - 1  # where the wait is 1 s
    assert found.missed is not None
    assert found.rate <= exact < found.missed
    assert found.missed <= 1.1 * found.rate


def test_every_probe_is_an_open_loop_with_requests_of_its_own(tmp_path: Path) -> None:
    server = Server(7.9)
    found = server.capacity(tmp_path, seconds=12.0)
    assert {(options.loop, options.seconds) for options in server.asked} == {("open", 12.0)}
    assert len({options.seed for options in server.asked}) == len(server.asked)
    written = json.loads((tmp_path / "capacity.json").read_text())
    assert written["rate"] == found.rate
    assert [probe["rate"] for probe in written["probes"]] == [options.rate for options in server.asked]
    assert len({probe["folder"] for probe in written["probes"]}) == len(server.asked)


def test_a_narrow_miss_is_repeated_and_a_clear_one_is_not(tmp_path: Path) -> None:
    luck = iter([1.15, 1.0, 1.0] + [1.0] * 20)  # the first probe at 6.9 has bad luck
    server = Server(7.91, lambda: next(luck))
    found = server.capacity(tmp_path, 6.9)
    assert [probe.rate for probe in found.probes][:4] == [6.9, 6.9, 6.9, 13.8]
    assert [probe.passed for probe in found.probes][:4] == [False, True, True, False]
    assert [probe.rate for probe in found.probes].count(13.8) == 1


def test_a_narrow_miss_stays_one_when_most_tries_miss(tmp_path: Path) -> None:
    luck = iter([1.15, 1.0, 1.15] + [1.0] * 20)
    found = Server(7.91, lambda: next(luck)).capacity(tmp_path, 6.9)
    assert [probe.passed for probe in found.probes][:4] == [False, True, False, True]
    assert [probe.rate for probe in found.probes][3] == 3.45
    assert found.missed == 6.9


def test_noise_moves_the_result_little(tmp_path: Path) -> None:
    rng = random.Random(1)
    found = [
        Server(8.0, lambda: rng.lognormvariate(0, 0.2)).capacity(tmp_path / str(index), start=3.0).rate
        for index in range(20)
    ]
    assert all(5.5 < rate < 8 for rate in found)


def test_limits_that_no_rate_meets_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="missed even at"):
        Server(0.0).capacity(tmp_path)


def test_a_server_that_carries_everything_has_no_upper_bound() -> None:
    found = search(lambda _: True, Bracket(1.0, steps=4))
    assert (found.rate, found.missed) == (8.0, None)
