"""`make soak`: twenty minutes at 70 % of what the server carries; nothing fails and nothing grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests.capacity import Bracket, CapacityOptions, find_capacity
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.run import LoadOptions, run_load
from cosytriton_loadtests.slo import judge
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD

SECONDS, PROBE_SECONDS, SHARE = 1200.0, 60.0, 0.7
CANCELLED, BAD = 0.1, 0.02
WAITS = Limits(all={"first_audio_p95": 3.0, "errors": 0.0})
GROWTH = 0.03  # from the fourth minute on


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """The default mix, of voices that were heard before.

    New ones fill Triton's cache and the prompts that `tts_stream` keeps until both are full, for an hour.
    """
    sections = DEFAULT_WORKLOAD.read_text().split("\n[")
    kept = [text for text in sections if not text.startswith(("voices.stranger]", "scenarios.new-voice]"))]
    assert len(kept) == len(sections) - 2
    path = tmp_path / "workload.toml"
    path.write_text("\n[".join(kept).replace("../tests", str(DEFAULT_WORKLOAD.parents[1] / "tests")))
    return path


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_at_70_percent_of_capacity_nothing_fails_and_nothing_grows(
    server: Any, workload: Path, tmp_path: Path
) -> None:
    base = LoadOptions(
        server.grpc_url,
        server.http_url,
        f"http://localhost:{server.metrics_port}",
        workload=workload,
        cancel_share=CANCELLED,
        bad_share=BAD,
    )
    search = CapacityOptions(Bracket(1.0, growth=1.6, precision=0.3), seconds=PROBE_SECONDS)
    carried = find_capacity(base, WAITS, tmp_path / "capacity", search)
    print(f"\ncapacity: {carried.rate:.2f} requests/s")
    soak = replace(base, loop="open", shape="soak", rate=SHARE * carried.rate, seconds=SECONDS, seed=1000)
    run = run_load(soak, tmp_path / "soak")
    limits = Limits(all={"errors": 0.0}, run={"memory_growth": GROWTH, "shared_memory_growth": GROWTH})
    verdict = judge(run, limits)
    for row in verdict.rows:
        print(row)
    assert verdict.passed, verdict.reason
