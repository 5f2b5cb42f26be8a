"""A server of one's own: `cosytriton serve` on free ports, for as long as it is needed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosytriton_ensemble.server import free_ports
from cosytriton_loadtests.errors import LoadTestError

START_SECONDS = 600.0
STOP_SECONDS = 60.0


@contextmanager
def served(repository: Path, profile: str, log: Path) -> Iterator[str]:
    """Serve a profile of the repository in the `with` block; gives `host:port` of gRPC.

    Raises:
        LoadTestError: the server does not start; the message has the end of its log.
    """
    ports = free_ports(3)
    names = ("--grpc-port", "--http-port", "--metrics-port")
    command = [
        *(str(Path(sys.executable).with_name("cosytriton")), "serve"),
        *(f"--repository={repository}", f"--profile={profile}", "--exit-timeout=2"),
        *(f"{name}={port}" for name, port in zip(names, ports, strict=True)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _await_ready(process, log, profile)
        yield f"localhost:{ports[0]}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], log: Path, profile: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while b"ready: Triton" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:]
            raise LoadTestError(f"the server of the profile {profile!r} did not become ready:\n{said}")
        time.sleep(0.1)
