"""What Locust is told at its start: our options, and what users, recorder and shape are made of them."""

from __future__ import annotations

import time
from argparse import SUPPRESS
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.event import Events
from locust.exception import StopTest
from locust.runners import WorkerRunner

from cosytriton_ensemble.errors import CosytritonError
from cosytriton_loadtests.addresses import Addresses
from cosytriton_loadtests.answers import Answers
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.locust_shape import Shape
from cosytriton_loadtests.recorder import Recorder
from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.run_log import RunLog, Told
from cosytriton_loadtests.shapes import PEAK, SHAPES, Planned, planned
from cosytriton_loadtests.users import Listener
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD, Workload
from cosytriton_loadtests.workload_file import read_workload

LOOPS = ("closed", "open")
BROKEN = 4  # exit status when a user fails by itself, not by its requests
STOP_TIMEOUT = 60  # seconds for requests in flight at the end; Locust's own default is none

_Value = TypeVar("_Value")


def register(events: Events) -> None:
    """Let Locust call this module."""
    events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]
    events.init.add_listener(set_up)  # type: ignore[no-untyped-call]


def add_arguments(parser: LocustArgumentParser) -> None:
    """Add the options of the load."""

    def add(name: str, default: Any, text: str, **more: Any) -> None:
        variable = "COSYTRITON_" + name.strip("-").replace("-", "_").upper()
        parser.add_argument(name, env_var=variable, default=default, help=text, **more)

    fixed = partial(add, include_in_web_ui=False)
    fixed("--workload", str(DEFAULT_WORKLOAD), "TOML file with the mix of requests")
    add("--http-url", "", "http://host:port (default: port 8000 of --host, which is the address of gRPC)")
    add("--loop", LOOPS[0], "open: users do not wait for answers", choices=LOOPS)
    add("--interval", 4.0, "open loop: mean seconds between the requests of one user", type=float)
    add("--seed", 0, "the same seed gives the same requests", type=int)
    fixed("--shape", "", "stages of the load (default: Locust's own users and ramp)", choices=("", *SHAPES))
    fixed("--peak", PEAK, "users of a spike, in relation to those before it", type=float)
    fixed("--folder", "", "where raw samples are written, for `cosytriton loadtest` (default: nowhere)")
    fixed("--warm-up", "", "seconds that are no part of the figures (default: a tenth of the run)")
    add("--answers", "", "where the audio of a tenth of the answers is kept, for `cosytriton loadtest`")
    # Text, because a field of the web page may stay empty.
    add("--cancel-share", "", "share of listeners of a stream who leave (default: as the workload says)")
    add("--bad-share", "", "share of requests to be refused (default: as the workload says)")
    parser.add_argument("--prepared", action="store_true", help=SUPPRESS, include_in_web_ui=False)
    parser.set_defaults(stop_timeout=STOP_TIMEOUT)


def set_up(environment: Environment, **_: Any) -> None:
    """Read the workload and connect users, recorder and shape; a wrong option ends it before it starts."""
    options = environment.parsed_options
    assert options is not None
    environment.stop_timeout = float(options.stop_timeout)
    Listener.workload = _checked(lambda: _workload(options))
    _checked(lambda: _told(options))
    log = RunLog(RunFolder(Path(options.folder)) if options.folder else None, partial(_told, options))
    Listener.recorder = Recorder(environment, log.write)
    Listener.answers = Answers(Path(options.answers)) if options.answers else None
    broken = partial(setattr, environment, "process_exit_code", BROKEN)
    environment.events.user_error.add_listener(lambda **_: broken())  # type: ignore[no-untyped-call]
    environment.events.test_start.add_listener(_forget_users)  # type: ignore[no-untyped-call]
    environment.events.test_stopping.add_listener(lambda **_: log.ended())  # type: ignore[no-untyped-call]
    if isinstance(environment.runner, WorkerRunner):
        return
    if options.shape:
        shape = Shape(lambda: _checked(lambda: _stages(options)), log.stage_began)
        if options.headless:
            shape.reset_time()  # complains now
        shape.runner = environment.runner
        environment.shape_class = shape
    else:
        begin = partial(_begin, log, options)
        environment.events.test_start.add_listener(begin)  # type: ignore[no-untyped-call]


def _forget_users(environment: Environment, **_: Any) -> None:
    """The same seed gives the same requests in each run; a worker has got the master's options by now."""
    Listener.numbers = count()
    try:
        Listener.workload = _workload(environment.parsed_options)
    except CosytritonError as error:  # typed into the web page, which stays
        raise StopTest(str(error)) from error


def _workload(options: Any) -> Workload:
    if options.interval <= 0:
        raise LoadTestError(f"--interval {options.interval:g}: a number of seconds above 0 is needed.")
    shares = (_number(options, name) for name in ("cancel_share", "bad_share"))
    return read_workload(Path(options.workload)).with_shares(*shares)


def _number(options: Any, name: str) -> float | None:
    given = getattr(options, name)
    try:
        return float(given) if given else None
    except ValueError as error:
        raise LoadTestError(f"--{name.replace('_', '-')} {given}: a number is needed, or nothing.") from error


def _told(options: Any) -> Told:
    """What `run.json` says: as `run_load` has written it, or else by the options alone."""
    addresses = Addresses(options.host or Listener.host, options.http_url)
    info = RunInfo(addresses.grpc, "", options.loop, 0.0, (), {"workload": options.workload})
    if options.prepared:
        info = RunFolder(Path(options.folder)).info()
    return Told(info, options.interval if options.loop == "open" else None, _number(options, "warm_up"))


def _stages(options: Any) -> tuple[Planned, ...]:
    if not options.run_time:
        raise LoadTestError(f"--shape {options.shape} needs --run-time, the length of all its stages.")
    return planned(options.shape, options.num_users or 1, float(options.run_time), options.peak)


def _begin(log: RunLog, options: Any, **_: Any) -> None:
    """Without a shape the whole run is one stage."""
    log.stage_began(Planned("steady", float(options.run_time or 0), options.num_users or 1), time.time())


def _checked(make: Callable[[], _Value]) -> _Value:
    try:
        return make()
    except CosytritonError as error:
        raise SystemExit(f"locust: error: {error}") from error
