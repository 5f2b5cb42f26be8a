"""Locust's processes: started, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cosytriton_loadtests.errors import LoadTestError

LOG = "locust.log"
GRACE = 15.0  # seconds for a process to end before it is killed


@contextmanager
def running(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write their log to the folder; they have ended when the block ends, even by SIGTERM."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOCUST_", "COSYTRITON_"))  # each is an option of Locust
    }
    processes: list[subprocess.Popen[bytes]] = []
    with _ended_by_sigterm(), (folder / LOG).open("wb") as log:
        try:
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
                    )
                )
            yield processes
        finally:
            _end(processes)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, as SIGINT does, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def await_end(processes: Sequence[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    """Wait until all have ended.

    Raises:
        LoadTestError: one failed, or they take longer than so many seconds.
    """
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if time.monotonic() > deadline:
            raise broken(f"Locust did not end within {seconds:.0f} s", folder)
        time.sleep(0.1)
    for process in processes:
        if process.returncode:
            raise broken(f"a process of Locust ended with status {process.returncode}", folder)


def broken(why: str, folder: Path) -> LoadTestError:
    """The error, with the end of what Locust wrote."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return LoadTestError(
        f"the load test broke off: {why}. The end of {folder / LOG}:\n" + "\n".join(lines[-15:])
    )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: gently, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
