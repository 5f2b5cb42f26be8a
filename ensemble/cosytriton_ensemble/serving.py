"""`cosytriton serve` as a user starts it, for as long as it is needed: a process on free ports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.server import free_ports

START_SECONDS = 600.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class RunningServer:
    """A `cosytriton serve` process and where it listens."""

    process: subprocess.Popen[bytes]
    log: Path
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def grpc_url(self) -> str:
        """`host:port`."""
        return f"localhost:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """With its scheme."""
        return f"http://localhost:{self.http_port}"

    def wait_ready(self, times: int = 1, seconds: float = START_SECONDS) -> None:
        """Wait until the server has said `times` times that it is ready; ServerError if it does not."""
        deadline = time.monotonic() + seconds
        while self.log.read_bytes().count(b"ready: Triton") < times:
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace")[-4000:]
                raise ServerError(f"The server did not become ready; the end of {self.log}:\n{said}")
            time.sleep(0.05)


@contextmanager
def serving(repository: Path, log: Path, *options: str) -> Iterator[RunningServer]:
    """Serve a repository in the `with` block, which begins when the server is ready.

    Args:
        repository: The model repository.
        log: Where the server's output goes.
        options: Of `cosytriton serve`, such as "--profile=cpu_int8".

    Raises:
        ServerError: it does not become ready, or does not end when it is told to and has to be killed.

    """
    ports = free_ports(3)
    names = ("--grpc-port", "--http-port", "--metrics-port")
    command = [
        *(str(Path(sys.executable).with_name("cosytriton")), "serve", f"--repository={repository}"),
        *(f"{name}={port}" for name, port in zip(names, ports, strict=True)),
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    running = RunningServer(process, log, *ports)
    try:
        running.wait_ready()
        yield running
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerError(f"The server did not end within {STOP_SECONDS:.0f} s; see {log}.") from None
