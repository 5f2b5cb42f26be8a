"""The Locust file, run as a user runs it: headless, with its figures in a CSV file."""

from __future__ import annotations

import csv
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VOICE = ROOT / "tests" / "data" / "librivox_austen.wav"
SECONDS = 10

Rows = dict[str, dict[str, str]]


def run_locust(folder: Path, url: str, seconds: int) -> tuple[int, Rows]:
    """Two users for some seconds: the exit status, and the rows of the report by request type."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), "--headless"),
        *("--users", "2", "--spawn-rate", "2", "--run-time", f"{seconds}s", "--stop-timeout", "20s"),
        *("--host", url, "--csv", str(folder / "report"), "--only-summary"),
        *("--voice", str(VOICE), "--transcript", VOICE.with_suffix(".txt").read_text()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    report = folder / "report_stats.csv"
    assert report.exists(), done.stderr
    with report.open() as file:
        return done.returncode, {row["Type"]: row for row in csv.DictReader(file)}


def test_both_waits_are_reported(server: Any, tmp_path: Path) -> None:
    status, rows = run_locust(tmp_path, server.grpc_url, SECONDS)
    first, whole = rows["first audio"], rows["whole speech"]
    assert status == 0
    assert int(whole["Request Count"]) == int(first["Request Count"]) > 0
    assert int(whole["Failure Count"]) == int(first["Failure Count"]) == 0
    assert 0 < float(first["Average Response Time"]) <= float(whole["Average Response Time"])
    assert float(whole["Average Content Size"]) > 0


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_server_that_is_not_there_is_a_failure(scheme: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status, rows = run_locust(tmp_path, f"{scheme}127.0.0.1:{free.getsockname()[1]}", 3)
    whole = rows["whole speech"]
    assert status == 1
    assert int(whole["Failure Count"]) == int(whole["Request Count"]) >= 2
    assert "first audio" not in rows
