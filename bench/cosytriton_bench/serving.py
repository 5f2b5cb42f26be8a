"""`cosytriton serve` as a user starts it, and what its processes take."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from tritonclient.grpc import InferenceServerClient

from cosytriton_bench.errors import BenchError
from cosytriton_ensemble.server import free_ports

START_SECONDS = 600
MEMORY_PERIOD = 1.0  # seconds between two looks; each takes milliseconds of a core


class ServerProcess:
    """A server of one profile on free ports; a context manager that waits until it speaks.

    Attributes:
        ready_seconds: from the start of the command until it said that it is ready.

    """

    def __init__(self, repository: Path, profile: str, log: Path, threads: int = 0) -> None:
        self._log = log
        ports = free_ports(3)
        self.url = f"localhost:{ports[0]}"
        names = ("--grpc-port", "--http-port", "--metrics-port")
        self._command = [
            str(Path(sys.executable).with_name("cosytriton")),
            "serve",
            f"--repository={repository}",
            f"--profile={profile}",
            *([f"--threads={threads}"] if threads else ()),  # default: as the doctor advises
            "--exit-timeout=2",  # nobody listens any more
            *(f"{name}={port}" for name, port in zip(names, ports, strict=True)),
        ]
        self.ready_seconds = 0.0

    def __enter__(self) -> Self:
        start = time.perf_counter()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        try:
            self._wait(start + START_SECONDS)
        except BaseException:
            self._end()
            raise
        self.ready_seconds = time.perf_counter() - start
        self._triton = InferenceServerClient(self.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._triton.close()
        self._end()

    def _wait(self, deadline: float) -> None:
        while b"ready: Triton" not in self._log.read_bytes():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                raise BenchError(f"The server did not become ready:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.05)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """CPU seconds of all processes so far; threads that have ended included."""
        total = 0.0
        for process in self._processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory(self) -> float:
        """Resident GB of all processes; a page that several share is counted once (PSS)."""
        total = 0
        for process in self._processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 1e9

    def compute_seconds(self, model: str) -> float:
        """What Triton has measured inside a model so far."""
        (stats,) = self._triton.get_inference_statistics(model).model_stats
        return float(stats.inference_stats.compute_infer.ns) / 1e9

    @contextmanager
    def memory_watched(self) -> Iterator[list[float]]:
        """Look at the memory all the while; the answers, in GB."""
        seen, done = [self.memory()], threading.Event()

        def watch() -> None:
            while not done.wait(MEMORY_PERIOD):
                seen.append(self.memory())

        watcher = threading.Thread(target=watch, name="memory")
        watcher.start()
        try:
            yield seen
        finally:
            done.set()
            watcher.join()
