"""The Locust file, run as a user runs it: headless with its figures in a CSV file, and with its web page."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests import statistics
from cosytriton_loadtests.run_folder import RunFolder

LOCUST_FILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
LOCUST = [sys.executable, "-m", "locust", "-f", str(LOCUST_FILE)]

Rows = dict[tuple[str, str], dict[str, str]]


def headless(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Rows]:
    """Two users for some seconds, and the rows of the report by request type and scenario."""
    command = [
        *(*LOCUST, "--headless", "--users", "2", "--spawn-rate", "2", "--only-summary"),
        *("--csv", str(folder / "report"), *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    report = folder / "report_stats.csv"
    if not report.exists():
        return done, {}
    with report.open() as file:
        return done, {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.loadtest
def test_the_default_mix_on_the_real_server(server: Any, tmp_path: Path) -> None:
    """Every scenario is spoken; leavers are no errors, and bad requests are refused."""
    addresses = (f"--host={server.grpc_url}", f"--http-url={server.http_url}")
    shares = ("--cancel-share=0.2", "--bad-share=0.2", f"--folder={tmp_path / 'run'}")
    done, rows = headless(tmp_path, "--run-time=12s", *addresses, *shares)
    assert done.returncode == 0, done.stderr
    first, whole = rows["first audio", "english"], rows["whole speech", "english"]
    assert 0 < int(whole["Request Count"]) <= int(first["Request Count"])
    assert 0 < float(first["Average Response Time"]) <= float(whole["Average Response Time"])
    assert float(whole["Average Content Size"]) > 0
    figures = statistics.of_run(RunFolder(tmp_path / "run"))[0]
    assert figures.failed == 0, figures.error_kinds
    assert figures.refused > 0
    assert figures.left > 0


def test_a_server_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    """Each request counts once, and users do not ask in a tight loop."""
    url = f"127.0.0.1:{free_port()}"
    done, rows = headless(tmp_path, "--run-time=2s", f"--host={url}", f"--http-url=http://{url}")
    assert done.returncode == 1
    whole = rows["", "Aggregated"]
    assert 2 <= int(whole["Failure Count"]) == int(whole["Request Count"]) <= 8
    assert not any(kind == "first audio" for kind, _ in rows)


def test_a_wrong_option_ends_it_before_it_starts(tmp_path: Path) -> None:
    done, _ = headless(tmp_path, "--workload=none.toml")
    assert done.returncode == 1
    assert "locust: error: none.toml: the workload cannot be read" in done.stderr


@contextmanager
def web_page(*options: str) -> Iterator[str]:
    """Locust with its web page; its address."""
    port = free_port()
    command = [*LOCUST, f"--web-port={port}", "--web-host=127.0.0.1", *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(30)


def opened(url: str, **fields: object) -> Any:
    data = urllib.parse.urlencode(fields).encode() if fields else None
    with urllib.request.urlopen(url, data, timeout=10) as response:
        return response.read().decode()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:  # not there yet
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_web_page_starts_and_stops_runs(fake_triton: Callable[..., Any], tmp_path: Path) -> None:
    server = fake_triton()
    options = [f"--host={server.url}", f"--http-url={server.http_url}", f"--folder={tmp_path / 'run'}"]
    with web_page(*options) as page:
        until(lambda: "cancel_share" in opened(page))
        folder = RunFolder(tmp_path / "run")
        for loop in ("closed", "open"):
            folder.samples_file.unlink(missing_ok=True)
            opened(f"{page}/swarm", user_count=2, spawn_rate=2, host=server.url, loop=loop, interval=0.1)
            until(lambda: folder.samples_file.exists() and folder.samples_file.stat().st_size > 0)
            opened(f"{page}/stop", now=1)
            info = folder.info()
            assert info.loop == loop
            assert [stage.rate for stage in info.stages] == [20.0 if loop == "open" else None]
            assert statistics.summarise(folder.samples(warm=False))[0].failed == 0
        opened(f"{page}/swarm", user_count=2, spawn_rate=2, host=server.url, loop="open", interval=-1)
        until(lambda: '"state":"stopped"' in opened(f"{page}/stats/requests").replace(" ", ""))
