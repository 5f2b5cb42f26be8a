"""The planner against the server that it simulates: its capacity is the one that load tests find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests.capacity import Bracket, CapacityOptions, find_capacity
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.planner import capacity, from_run, mix_of_run
from cosytriton_loadtests.run import LoadOptions, run_load

pytestmark = pytest.mark.loadtest

VOICE = Path(__file__).parents[2] / "data" / "librivox_austen.wav"
LOW_RATE = 1.0
SECONDS, PROBE_SECONDS = 40.0, 20.0
# A median moves less from one short probe to the next than a tail does.
LIMITS = Limits(all={"first_audio_p50": 1.5, "errors": 0.0})
WORKLOAD = f"""
[texts]
short = ["one two three four five", "Thank you, we are ready now.", "Please wait one moment."]

[voices.known]
wav = "{VOICE}"
transcript = "he might even have been made amiable himself"

[scenarios.short]
texts = ["short"]
voices = ["known"]
"""


def test_the_planner_knows_what_the_server_carries(server: Any, tmp_path: Path) -> None:
    workload = tmp_path / "workload.toml"
    workload.write_text(WORKLOAD)
    metrics = f"http://localhost:{server.metrics_port}"
    base = LoadOptions(server.grpc_url, metrics_url=metrics, workload=workload, users=4, stop_timeout=20)
    low = replace(base, loop="open", rate=LOW_RATE, seconds=SECONDS)
    run = run_load(low, tmp_path / "low")
    times, mix = from_run(run), mix_of_run(run)
    planned = capacity(times, mix, LIMITS, LOW_RATE, seconds=PROBE_SECONDS)
    options = CapacityOptions(Bracket(planned, growth=1.3), seconds=PROBE_SECONDS)
    measured = find_capacity(base, LIMITS, tmp_path, options)
    assert measured.missed is not None
    middle = (measured.rate * measured.missed) ** 0.5
    assert planned == pytest.approx(middle, rel=0.15)
