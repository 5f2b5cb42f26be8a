"""Looks at the server under load: its metrics, and its processes where they run on this machine."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run_folder import RunFolder, RunInfo

PERIOD = 0.5  # seconds between two looks
PATIENCE = 2.0  # seconds that a look waits for the metrics
HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}
SHARED_MEMORY = Path("/dev/shm")
WATCHED = ("nv_", "cosytriton_")
# A line of the Prometheus text format: a name, labels if there are any, a value.
_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')

Metrics = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the server.

    Attributes:
        name: what it does: the model that it runs, or its program.
        pid: its number.
        memory: resident bytes; what it shares with others is counted in each of them.
        cpu: seconds of a core that it has used since its start.
    """

    name: str
    pid: int
    memory: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one time.

    Attributes:
        at: seconds since the epoch.
        metrics: name -> model (or GPU, or "") -> value; summed over further labels, such as the version.
        processes: of the server; none where it is not on this machine.
        shared_memory: bytes in use of /dev/shm, by whomever; 0 where the server is not on this machine.
        problem: why there are no metrics; "" when there are.
    """

    at: float
    metrics: Metrics = field(default_factory=dict)
    processes: tuple[Process, ...] = ()
    shared_memory: int = 0
    problem: str = ""

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of(cls, line: str) -> Look:
        """From what `line` wrote."""
        fields = json.loads(line)
        return cls(**fields | {"processes": tuple(Process(**one) for one in fields["processes"])})


def read_looks(path: Path) -> list[Look]:
    """Every look of a run in its order; none when nobody looked.

    Raises:
        LoadTestError: the file holds something else.
    """
    if not path.is_file():
        return []
    try:
        return [Look.of(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError, KeyError) as error:
        raise LoadTestError(f"{path}: this is not what a server was seen to do ({error}).") from error


@contextmanager
def watch(info: RunInfo, folder: RunFolder, period: float = PERIOD) -> Iterator[None]:
    """Write a look every `period` seconds to the folder while the block runs, and one at its end."""
    watcher, done = _Watcher(info), threading.Event()

    def look_on() -> None:
        with folder.server_file.open("w", encoding="utf-8") as file:
            last = False
            while not last:
                last = done.is_set()
                file.write(f"{watcher.look().line()}\n")
                file.flush()
                done.wait(period)

    thread = threading.Thread(target=look_on, name="server-watch")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def parse_metrics(text: str) -> Metrics:
    """Triton's and cosytriton's own metrics from the Prometheus text format, buckets left out."""
    metrics: Metrics = {}
    for found in filter(None, map(_LINE.match, text.splitlines())):
        name = found["name"]
        if not name.startswith(WATCHED) or name.endswith("_bucket"):
            continue
        labels = dict(_LABEL.findall(found["labels"] or ""))
        whose = labels.get("model") or labels.get("gpu_uuid") or ""
        values = metrics.setdefault(name, {})
        values[whose] = values.get(whose, 0.0) + float(found["value"])
    return metrics


def server_at(port: int) -> psutil.Process | None:
    """The process on this machine that listens at a port, or the `cosytriton serve` that started it."""
    listening = (
        found.pid
        for found in psutil.net_connections(kind="tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
    )
    pid = next((pid for pid in listening if pid), None)
    if pid is None:
        return None
    server = psutil.Process(pid)
    parent = server.parent()
    return parent if parent and "serve" in parent.cmdline() else server


class _Watcher:
    """Looks at one server."""

    def __init__(self, info: RunInfo) -> None:
        url = info.url if "//" in info.url else f"//{info.url}"
        address = urlsplit(url)
        self._port = address.port if address.hostname in HERE else None
        self._server: psutil.Process | None = None
        self._metrics_url = (
            info.metrics_url and f"{info.metrics_url.rstrip('/').removesuffix('/metrics')}/metrics"
        )

    def look(self) -> Look:
        """Look once. What cannot be seen is left out."""
        at = time.time()
        metrics, problem = self._metrics()
        processes = self._processes()
        shared = shutil.disk_usage(SHARED_MEMORY).used if processes and SHARED_MEMORY.is_dir() else 0
        return Look(at, metrics, processes, shared, problem)

    def _metrics(self) -> tuple[Metrics, str]:
        if not self._metrics_url:
            return {}, "no address of the server's metrics was given"
        try:
            with urllib.request.urlopen(self._metrics_url, timeout=PATIENCE) as response:
                return parse_metrics(response.read().decode()), ""
        except (OSError, ValueError) as error:
            return {}, f"{self._metrics_url} does not answer: {error}"

    def _processes(self) -> tuple[Process, ...]:
        """The server's and all that it started; none where it is elsewhere, or belongs to somebody else."""
        try:
            if self._port and not (self._server and self._server.is_running()):
                self._server = server_at(self._port)  # takes longer than all the rest
            if self._server is None:
                return ()
            found = [self._server, *self._server.children(recursive=True)]
        except (psutil.Error, OSError):
            return ()
        return tuple(filter(None, map(_seen, found)))


def _seen(process: psutil.Process) -> Process | None:
    try:
        with process.oneshot():
            cpu, memory = process.cpu_times(), process.memory_info().rss
            return Process(_name(process), process.pid, memory, cpu.user + cpu.system)
    except psutil.Error:  # it has just ended
        return None


def _name(process: psutil.Process) -> str:
    """The model that a stub of Triton's Python backend runs, or the program's name."""
    program, *arguments = process.cmdline() or [""]
    if "python_backend_stub" not in program or not arguments:
        return process.name()
    return Path(arguments[0]).parents[1].name  # repository/model/version/file
