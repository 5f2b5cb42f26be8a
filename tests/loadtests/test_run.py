"""Whole load tests, with Locust in its processes, against a server of known service times."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cosytriton_loadtests import statistics
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run import LoadOptions, run_load
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.workload_file import read_workload

WAV = Path(__file__).parents[1] / "data" / "librivox_austen.wav"
SERVICE = 0.05
WORKLOAD = """
[texts]
words = ["one two three"]
{texts}
[voices.anna]
name = "anna"
[voices.stranger]
wav = "{wav}"
new = true
{scenarios}
"""

Fake = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadOptions]:
    """Options for a fake server: `load(fake, ["grpc", "http"], seconds=3)`; a scenario for each protocol."""

    def options(server: Any, protocols: list[str], texts: str = "words", **more: Any) -> LoadOptions:
        path = tmp_path / "workload.toml"
        scenarios = "".join(
            f'[scenarios.of-{name}]\nprotocol = "{name}"\ntexts = ["{texts}"]\n'
            'voices = ["anna", "stranger"]\n'
            for name in protocols
        )
        texts = "" if texts == "words" else f'{texts} = ["{texts}"]'
        path.write_text(WORKLOAD.format(wav=WAV, scenarios=scenarios, texts=texts))
        addresses = {"url": server.url, "http_url": server.http_url, "metrics_url": ""}
        return LoadOptions(**addresses, workload=path, **{"seconds": 3} | more)

    return options


def samples(folder: RunFolder) -> list[Sample]:
    return list(folder.samples(warm=False))


def assert_of_the_seed(options: LoadOptions, heard: list[Sample]) -> None:
    """Each request once, and all of them are those that the users have to make."""
    workload = read_workload(options.workload).with_shares(options.cancel_share, options.bad_share)
    asks = [workload.asks(options.seed, user) for user in range(options.users)]
    expected = {next(user).options["seed"] for _ in heard for user in asks}
    made = [sample.request["options"]["seed"] for sample in heard]
    assert len(set(made)) == len(made)
    assert set(made) <= expected


def processes_of_locust() -> list[int]:
    found = (process for process in psutil.process_iter(["cmdline", "status"]))
    return [
        process.pid
        for process in found
        if "locust" in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_all_protocols_in_an_open_loop(fake_triton: Fake, load: Any, tmp_path: Path) -> None:
    """Users of every protocol overlap; leavers and bad requests are told apart; nothing is lost."""
    server = fake_triton(f"--service={SERVICE}")
    protocols = ["grpc-stream", "grpc", "http", "http-stream"]
    options = load(server, protocols, loop="open", rate=40, users=4, seconds=2, seed=9)
    options = replace(options, cancel_share=0.2, bad_share=0.1)
    folder = run_load(options, tmp_path / "run")
    heard = samples(folder)
    whole = statistics.of_run(folder)[0]
    assert {sample.protocol for sample in heard} == set(protocols)
    assert whole.failed == 0, whole.error_kinds
    assert whole.left > 0
    assert whole.refused > 0
    assert len(server.served()) == sum(not sample.request["bad"] for sample in heard)
    # 40 requests a second of 50 ms each overlap, or they would wait for each other.
    assert whole.value("first_audio_p50") == pytest.approx(SERVICE, abs=0.03)
    assert [stage.name for stage in folder.info().stages] == ["steady"]
    assert {sample.stage for sample in heard} == {"steady"}
    assert_of_the_seed(options, heard)


@pytest.mark.loadtest
def test_what_is_still_under_way_at_the_end_is_an_error(fake_triton: Fake, load: Any, tmp_path: Path) -> None:
    """And a request that hangs does not stop the others."""
    options = load(fake_triton(), ["grpc-stream", "http-stream", "http"], "hang", users=8)
    options = replace(options, seconds=2, stop_timeout=1)
    heard = samples(run_load(options, tmp_path / "run"))
    hung = [sample for sample in heard if sample.error]
    assert {sample.error for sample in hung} == {"UnfinishedError"}
    assert {sample.protocol for sample in hung} == {"grpc-stream", "http-stream"}
    assert "--stop-timeout" in hung[0].message
    assert any(sample.protocol == "http" for sample in heard if not sample.error)


def test_a_server_that_is_not_there_is_refused(load: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    for name, protocol in (("grpc", "grpc"), ("http", "http-stream")):
        nobody = type("Nobody", (), {"url": url, "http_url": f"http://{url}"})
        with pytest.raises(LoadTestError, match=f"nobody answers at .*{url}.*start the server"):
            run_load(load(nobody, [protocol]), tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_is_not_ready_is_refused(
    fake_triton: Fake, load: Any, tmp_path: Path, protocol: str
) -> None:
    with pytest.raises(LoadTestError, match="does not serve 'tts' now: wait until it is ready"):
        run_load(load(fake_triton("--loading"), [protocol]), tmp_path / "run")


def test_a_folder_is_not_used_twice(tmp_path: Path) -> None:
    RunFolder(tmp_path).samples_file.write_text("")
    with pytest.raises(LoadTestError, match="holds a run already"):
        run_load(LoadOptions(), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": "half"}, "loop = 'half': allowed is 'closed' or 'open'"),
        ({"loop": "open"}, "rate = None: allowed is a number above 0 in an open loop"),
        ({"rate": 3.0}, "and None in a closed one"),
        ({"users": 0}, "users = 0"),
        ({"seconds": 0}, "seconds = 0"),
        ({"warm_up": 60}, "warm_up = 60"),
        ({"workers": -1}, "workers = -1"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        LoadOptions(**options)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.loadtest)])
def test_a_signal_takes_the_children_along(
    fake_triton: Fake, load: Any, tmp_path: Path, number: signal.Signals
) -> None:
    options = load(fake_triton(), ["grpc-stream"], seconds=60, users=2, stop_timeout=1)
    code = (
        "from pathlib import Path; from cosytriton_loadtests.run import LoadOptions, run_load; "
        f"run_load(LoadOptions(url={options.url!r}, workload=Path({str(options.workload)!r}), "
        "metrics_url='', seconds=60, users=2, workers=1, stop_timeout=1), "
        f"Path({str(tmp_path / 'run')!r}))"
    )
    before = set(processes_of_locust())
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    served = tmp_path / "run" / "samples.jsonl"
    while not (served.exists() and served.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    children = set(processes_of_locust()) - before
    assert len(children) == 2
    os.kill(process.pid, number)
    assert process.wait(30) != 0
    assert not children & set(processes_of_locust())


def lindley(served: list[dict[str, float]]) -> list[float]:
    """When a queue with one server ends the work of each request, in seconds since the epoch.

    Lindley's recursion over arrivals a and work s, in their order: e' = max(e, a) + s.
    """
    ends: list[float] = [0.0]
    for times in sorted(served, key=lambda times: times["came"]):
        ends.append(max(ends[-1], times["came"]) + times["worked"] - times["began"])
    return ends[1:]


@pytest.mark.loadtest
def test_the_open_loop_shows_the_queue_that_the_closed_one_hides(
    fake_triton: Fake, load: Any, tmp_path: Path
) -> None:
    service = 0.1
    server = fake_triton(f"--service={service}", "--slots=1")
    closed = run_load(load(server, ["grpc-stream"], users=1, seconds=5), tmp_path / "closed")
    before, rate = len(server.served()), 0.75 / service
    opened = run_load(load(server, ["grpc-stream"], loop="open", rate=rate, seconds=30), tmp_path / "open")
    alone, queued = statistics.of_run(closed)[0], statistics.of_run(opened)[0]
    # The closed loop reaches the higher rate and sees no wait at all.
    assert alone.answers_rate > rate
    assert (alone.value("first_audio_p95") or 0) < 1.3 * service
    assert (queued.value("first_audio_p95") or 0) > 2.5 * service
    intended = sorted(sample.intended for sample in samples(opened))
    expected = np.subtract(lindley(server.served()[before:]), intended)
    for share in (50, 90, 95):
        theory = np.percentile(expected, share)
        seen = np.percentile([sample.first_audio or 0 for sample in samples(opened)], share)
        print(f"p{share}: by Lindley {theory:.3f} s, measured {seen:.3f} s, one user alone {service} s")
        assert seen == pytest.approx(theory, rel=0.06)


@pytest.mark.loadtest
def test_workers_give_the_figures_of_one_process(fake_triton: Fake, load: Any, tmp_path: Path) -> None:
    server = fake_triton("--service=0.2", "--exponential")
    folders = [
        run_load(
            load(server, ["grpc-stream", "http"], loop="open", users=8, rate=20, seconds=8, workers=workers),
            tmp_path / f"workers-{workers}",
        )
        for workers in (0, 2)
    ]
    alone, shared = (statistics.of_run(folder)[0] for folder in folders)
    one, two = ({sample.request["options"]["seed"] for sample in samples(folder)} for folder in folders)
    assert len(one & two) > 0.85 * max(len(one), len(two))
    assert shared.failed == alone.failed == 0
    assert len(server.served()) == sum(len(samples(folder)) for folder in folders)  # none was lost
    assert shared.requests == pytest.approx(alone.requests, rel=0.15)
    for measure in ("first_audio_p50", "first_audio_p90", "whole_p50", "audio_rate"):
        print(measure, alone.value(measure), shared.value(measure))
        assert shared.value(measure) == pytest.approx(alone.value(measure), rel=0.15)


@pytest.mark.loadtest
def test_what_workers_have_under_way_at_the_end_is_not_lost(
    fake_triton: Fake, load: Any, tmp_path: Path
) -> None:
    server = fake_triton("--service=1.5")
    options = load(server, ["grpc-stream"], loop="open", rate=20, users=8, seconds=3, workers=2)
    heard = samples(run_load(options, tmp_path / "run"))
    assert len(heard) == len(server.served())
    assert any(sample.ended > sample.intended + 1 for sample in heard)
    assert not any(sample.error for sample in heard)
