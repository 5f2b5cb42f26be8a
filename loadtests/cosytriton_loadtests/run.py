"""Runs one load test: Locust in processes of its own, so that gevent stays out of ours."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cosytriton_ensemble.server import free_ports
from cosytriton_loadtests import answers
from cosytriton_loadtests.addresses import METRICS_PORT, Addresses, check_ready
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.locust_process import await_end, broken, running
from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.server_watch import watch
from cosytriton_loadtests.shapes import PEAK, planned
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD
from cosytriton_loadtests.workload_file import read_workload

WARM_UP = 0.1  # of the run, unless another one is asked for
PATIENCE = 90.0  # seconds that Locust may take to start and to end, beyond the run and the stop timeout
_LOCUST_FILE = '''"""The users of a load test; written by cosytriton."""

from locust import events

from cosytriton_loadtests import locust_setup
from cosytriton_loadtests.users import Listener

locust_setup.register(events)
'''


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What load to make.

    Attributes:
        url: the server's address for gRPC.
        http_url: its address for HTTP; "": port 8000 of the same host.
        metrics_url: of its metrics; None: port 8002 of the same host; "": nobody may read them.
        workload: TOML file with the mix of requests.
        loop: "closed" (a user waits for the answer) or "open" (requests come at the rate, whatever happens).
        users: Locust users; in an open loop, sources that share the rate.
        rate: requests in a second, open loop only; of the stages with `users` users.
        shape: one of `shapes.SHAPES`.
        peak: users of a spike, in relation to those before it.
        seconds: length of all stages.
        warm_up: seconds that are no part of the figures; None: a tenth of the run.
        seed: the same seed gives the same requests; a voice that is to be new is so for each seed once.
        workers: processes that make the load, beside a master; 0: one process does all.
        cancel_share: share of listeners of a stream who leave, in all scenarios; None: as the workload says.
        bad_share: share of requests that have to be refused, likewise.
        stop_timeout: seconds for requests in flight at the end; then they count as errors.

    Raises:
        LoadTestError: a value is not allowed.
    """

    url: str = "localhost:8001"
    http_url: str = ""
    metrics_url: str | None = None
    workload: Path = DEFAULT_WORKLOAD
    loop: str = "closed"
    users: int = 8
    rate: float | None = None
    shape: str = "constant"
    peak: float = PEAK
    seconds: float = 60.0
    warm_up: float | None = None
    seed: int = 0
    workers: int = 0
    cancel_share: float | None = None
    bad_share: float | None = None
    stop_timeout: float = 60.0

    def __post_init__(self) -> None:
        wrong = {
            "loop": self.loop not in ("closed", "open"),
            "users": self.users < 1,
            "rate": (self.rate or 0) <= 0 if self.loop == "open" else self.rate is not None,
            "peak": self.peak <= 0,
            "seconds": self.seconds < 1,
            "warm_up": self.warm_up is not None and not 0 <= self.warm_up < self.seconds,
            "seed": self.seed < 0,
            "workers": self.workers < 0,
            "stop_timeout": self.stop_timeout < 0,
        }
        if found := [name for name, is_wrong in wrong.items() if is_wrong]:
            name = found[0]
            raise LoadTestError(f"{name} = {getattr(self, name)!r}: allowed is {_ALLOWED[name]}.")

    @property
    def addresses(self) -> Addresses:
        """Of the server."""
        return Addresses(self.url, self.http_url)


_ALLOWED = {
    "loop": "'closed' or 'open'",
    "users": "1 or more",
    "rate": "a number above 0 in an open loop, and None in a closed one",
    "peak": "a number above 0",
    "seconds": "1 or more",
    "warm_up": "0 or more, and less than the whole run",
    "seed": "0 or more",
    "workers": "0 or more",
    "stop_timeout": "0 or more",
}


def run_load(options: LoadOptions, folder: Path) -> RunFolder:
    """Put the load on the server and wait until its last answer.

    Args:
        options: the load.
        folder: for the run; made, and must not hold another one.

    Raises:
        LoadTestError: the server is not ready, an option is wrong, or the load test broke off.
    """
    run = RunFolder(folder)
    if run.samples_file.exists():
        raise LoadTestError(f"{folder}: this folder holds a run already; give another one, or remove it.")
    workload = read_workload(options.workload).with_shares(options.cancel_share, options.bad_share)
    planned(options.shape, options.users, options.seconds, options.peak)  # complains
    check_ready(options.addresses, workload.protocols())
    info = _info(options)
    run.write_info(info)
    (folder / "locustfile.py").write_text(_LOCUST_FILE, encoding="utf-8")
    commands = _commands(options, folder.resolve(), info.warm_up)
    with running(commands, folder) as processes, watch(info, run):
        await_end(processes, options.seconds + options.stop_timeout + PATIENCE, folder)
    if not run.samples_file.exists() or not run.samples_file.stat().st_size:
        raise broken("no request was made", folder)
    return run


def _info(options: LoadOptions) -> RunInfo:
    given = asdict(options) | {"workload": str(options.workload)}
    metrics = options.metrics_url
    if metrics is None:
        metrics = f"http://{options.addresses.host}:{METRICS_PORT}/metrics"
    warm_up = WARM_UP * options.seconds if options.warm_up is None else options.warm_up
    return RunInfo(options.url, metrics, options.loop, warm_up, (), given, _machine())


def _machine() -> dict[str, Any]:
    """What makes the load; a busy generator measures itself."""
    return {
        "system": platform.platform(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def _commands(options: LoadOptions, folder: Path, warm_up: float) -> list[list[str]]:
    """The command lines of Locust's processes, the one that ends by itself first."""
    given: dict[str, object] = {
        "locustfile": folder / "locustfile.py",
        "host": options.url,
        "http-url": options.http_url,
        "workload": options.workload.resolve(),
        "loop": options.loop,
        "interval": options.users / options.rate if options.rate else None,
        "seed": options.seed,
        "answers": folder / answers.FOLDER,
        "cancel-share": options.cancel_share,
        "bad-share": options.bad_share,
        "stop-timeout": math.ceil(options.stop_timeout),  # Locust takes whole seconds
    }
    first: dict[str, object] = {
        "shape": options.shape,
        "peak": options.peak,
        "users": options.users,
        "run-time": math.ceil(options.seconds),
        "warm-up": warm_up,
        "folder": folder,
        "exit-code-on-error": 0,  # requests that failed are a result
    }
    base = [sys.executable, "-m", "locust", "--headless", "--only-summary", "--prepared", *_flags(given)]
    if not options.workers:
        return [[*base, *_flags(first)]]
    (port,) = free_ports(1)
    master = {"master-bind-host": "127.0.0.1", "master-bind-port": port, "expect-workers": options.workers}
    worker = {"master-host": "127.0.0.1", "master-port": port}
    return [
        [*base, "--master", *_flags(first | master)],
        *([*base, "--worker", *_flags(worker)] for _ in range(options.workers)),
    ]


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items() if value not in (None, "")]
