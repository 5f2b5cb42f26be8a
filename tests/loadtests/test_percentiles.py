"""The figures of a run on the real server, against a clock that stands between client and server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_loadtests import statistics
from cosytriton_loadtests.run import LoadOptions, run_load

WORKLOAD = """
[texts]
en = ["Hello, how are you today?", "Please wait one moment.", "My name is number five."]
[voices.known]
wav = "{wav}"
transcript = "he might even have been made amiable himself"
[scenarios.english]
texts = ["en"]
voices = ["known"]
"""


@pytest.mark.loadtest
def test_percentiles_are_those_of_an_independent_clock(server: Any, proxies: Any, tmp_path: Path) -> None:
    wav = Path(__file__).parents[1] / "data" / "librivox_austen.wav"
    workload = tmp_path / "workload.toml"
    workload.write_text(WORKLOAD.format(wav=wav))
    clock = proxies.Clock()
    with proxies.proxy(server.grpc_url, answers=clock, company=False) as url:
        options = LoadOptions(url, metrics_url="", workload=workload, users=2, seconds=20, warm_up=0)
        whole = statistics.of_run(run_load(options, tmp_path / "run"))[0]
    assert whole.failed == 0
    assert whole.requests == len(clock.waits(0)) > 20
    for measure, times in (("first_audio", clock.waits(0)), ("whole", clock.waits(-1))):
        for percentile in (50, 90, 95, 99, 100):
            name = f"{measure}_p{percentile}" if percentile < 100 else f"{measure}_max"
            seen, expected = whole.value(name), float(np.percentile(times, percentile))
            print(f"{name}: {seen:.4f} s, by the independent clock {expected:.4f} s")
            assert seen == pytest.approx(expected, rel=0.02)
