"""What the processes of a running server take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil
from tritonclient.grpc import InferenceServerClient

from cosytriton_ensemble.serving import RunningServer

MEMORY_PERIOD = 1.0  # seconds between two looks; each takes milliseconds of a core


class ServerFigures(AbstractContextManager["ServerFigures"]):
    """Reads what a server's processes take, for as long as it is entered."""

    def __init__(self, server: RunningServer) -> None:
        self.url = server.grpc_url
        self._pid, self._triton = server.process.pid, InferenceServerClient(self.url)

    def __exit__(self, *_: object) -> None:
        self._triton.close()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._pid)
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
