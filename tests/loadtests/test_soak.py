"""`make soak`: twenty minutes at 70 % of what the server carries; nothing fails and nothing grows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests.capacity import Bracket, CapacityOptions, find_capacity
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.run import LoadOptions, run_load
from cosytriton_loadtests.slo import judge

SECONDS, SHARE = 1200.0, 0.7
CANCELLED, BAD = 0.1, 0.02
WAITS = Limits(all={"first_audio_p95": 3.0, "errors": 0.0})
GROWTH = 0.03  # from the fourth minute on
STATE_MIB = 32  # what voices and streams may keep: full before the fourth minute


@pytest.fixture
def server(
    serve: Callable[..., AbstractContextManager[Any]], demo_repository: Path, tmp_path: Path
) -> Iterator[Any]:
    """The demo voice with a small budget for what is kept: with the usual one it fills for an hour."""
    repository = tmp_path / "model_repository"
    shutil.copytree(demo_repository, repository)
    config = repository / "tts_stream" / "config.pbtxt"
    setting = r'(key: "flow_state_mib"\s+value {\s+string_value: )"\d+"'
    text, found = re.subn(setting, rf'\1"{STATE_MIB}"', config.read_text())
    assert found == 1
    config.write_text(text)
    with serve(repository, tmp_path / "serve.log") as running:
        yield running


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_at_70_percent_of_capacity_nothing_fails_and_nothing_grows(server: Any, tmp_path: Path) -> None:
    base = LoadOptions(
        server.grpc_url,
        server.http_url,
        f"http://localhost:{server.metrics_port}",
        cancel_share=CANCELLED,
        bad_share=BAD,
    )
    search = CapacityOptions(Bracket(1.0, growth=1.6, precision=0.3), seconds=20)
    carried = find_capacity(base, WAITS, tmp_path / "capacity", search)
    print(f"\ncapacity: {carried.rate:.2f} requests/s")
    soak = replace(base, loop="open", shape="soak", rate=SHARE * carried.rate, seconds=SECONDS, seed=1000)
    run = run_load(soak, tmp_path / "soak")
    limits = Limits(all={"errors": 0.0}, run={"memory_growth": GROWTH, "shared_memory_growth": GROWTH})
    verdict = judge(run, limits)
    for row in verdict.rows:
        print(row)
    assert verdict.passed, verdict.reason
