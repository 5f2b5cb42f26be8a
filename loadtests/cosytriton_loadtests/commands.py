"""The subcommand `cosytriton loadtest`. Exit status: 0 limits kept, 1 limits missed, 2 an error."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosytriton_ensemble.cli import Command

if TYPE_CHECKING:
    from cosytriton_loadtests.run_folder import RunFolder

log = logging.getLogger(__name__)

LIMITS = Path(__file__).parents[1] / "slo.toml"
FOLDER = Path("build/loadtest")

Option = tuple[Callable[[str], Any], str]

# Fields of the dataclasses that take them and know their defaults -> type, help of the command line.
LOAD: dict[str, Option] = {
    "url": (str, "host:port of the server's gRPC"),
    "http_url": (str, "http://host:port (default: port 8000 of the same host)"),
    "metrics_url": (str, "of the server's metrics, '' for none (default: port 8002 of the same host)"),
    "workload": (Path, "TOML file with the mix of requests"),
    "loop": (
        str,
        "closed: users wait for their answers; open: requests come at the rate, as they do in life",
    ),
    "users": (int, "users; in an open loop, sources that share the rate"),
    "rate": (float, "requests a second, in an open loop"),
    "shape": (str, "constant, step, spike or soak"),
    "peak": (float, "users of a spike, in relation to those before it"),
    "seconds": (float, "length of the run"),
    "warm_up": (float, "seconds that are no part of the figures (default: a tenth of the run)"),
    "seed": (int, "the same seed gives the same requests"),
    "workers": (int, "processes that make the load, beside a master"),
    "cancel_share": (float, "share of listeners of a stream who leave"),
    "bad_share": (float, "share of requests that have to be refused"),
    "stop_timeout": (float, "seconds for requests in flight at the end"),
}
SET_BY_SEARCH = ("loop", "rate")
SEARCH: dict[str, Option] = {
    "start": (float, "the first rate that is tried, requests a second"),
    "precision": (float, "relative width of the interval that the search ends with"),
}
PLAN: dict[str, Option] = {
    "rate": (float, "requests a second that are to be carried"),
    "load": (Path, "folder of a load test at a low rate, which gives stage times and mix"),
    "busy": (Path, "folder of a load test near the capacity: how much stages slow each other"),
    "times": (Path, "stage_times.json of an earlier plan, instead"),
    "bench": (Path, "results.json of `cosytriton bench`, instead"),
    "profile": (str, "of the benchmark"),
    "speech": (lambda text: tuple(map(float, text.split(","))), "seconds of speech, such as 2,5,20: the mix"),
    "cores": (float, "of a replica"),
    "most": (int, "replicas at most"),
    "surge": (float, "by how much the rate rises in a spike, to compare autoscaling policies"),
    "start": (float, "seconds until a new pod is ready"),
    "seed": (int, "of arrivals and choices"),
}


def _add(parser: argparse.ArgumentParser, options: Mapping[str, Option], *required: str) -> None:
    for name, (kind, text) in options.items():
        flag, needed = f"--{name.replace('_', '-')}", name in required
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, required=needed, help=text)


def _given(args: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name in options}


def _limits_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limits", type=Path, default=LIMITS, help="TOML file (default: %(default)s)")


def _judge_arguments(parser: argparse.ArgumentParser) -> None:
    _limits_argument(parser)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="an earlier run, shown beside this one and the baseline",
    )


def _conclude(folder: RunFolder, args: argparse.Namespace) -> int:
    """Judge, write the report, say both."""
    from cosytriton_loadtests.limits import Limits
    from cosytriton_loadtests.report import write_report
    from cosytriton_loadtests.run_folder import RunFolder
    from cosytriton_loadtests.slo import judge

    against = RunFolder(args.against) if args.against else None
    verdict = judge(folder, Limits.read(args.limits), against)
    log.info("report: %s", write_report(folder, verdict, against))
    log.info("%s: %s", "passed" if verdict.passed else "failed", verdict.reason)
    return 0 if verdict.passed else 1


def _folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", help=f"for the run (default: one in {FOLDER})")


def _folder(args: argparse.Namespace) -> Path:
    return args.folder or FOLDER / time.strftime("%Y-%m-%d-%H%M%S")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_arguments(parser)
    _add(parser, LOAD)
    _judge_arguments(parser)
    parser.add_argument(
        "--check",
        type=float,
        default=0.1,
        help="share of answers that are asked for again, alone (%(default)s)",
    )


def _run(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.errors import LoadTestError
    from cosytriton_loadtests.limits import Limits
    from cosytriton_loadtests.quality import check
    from cosytriton_loadtests.run import LoadOptions, run_load
    from cosytriton_loadtests.slo import write_differences

    Limits.read(args.limits)  # what is wrong in it is said before the run, not behind it
    options = LoadOptions(**_given(args, LOAD))
    folder = run_load(options, _folder(args))
    if args.check:
        try:
            write_differences(folder, check(folder, options.url, args.check))
        except LoadTestError as error:  # no reason to leave the run without a verdict
            log.warning("no answer was checked: %s", error)
    return _conclude(folder, args)


def _again_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of a run, such as Locust's web page leaves behind")
    _judge_arguments(parser)


def _again(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.run_folder import RunFolder

    return _conclude(RunFolder(args.folder), args)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="folder of a run")
    parser.add_argument("now", type=Path, help="folder of a later one")


def _compare(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.compare import changes
    from cosytriton_loadtests.run_folder import RunFolder

    found = changes(RunFolder(args.before), RunFolder(args.now))
    for change in found:
        log.info("%s", change)
    worse = sum(change.worse for change in found)
    log.info("%d of %d medians became worse beyond the noise", worse, len(found))
    return 1 if worse else 0


def _capacity_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_arguments(parser)
    _limits_argument(parser)
    _add(parser, {name: option for name, option in LOAD.items() if name not in SET_BY_SEARCH} | SEARCH)


def _capacity(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.capacity import Bracket, CapacityOptions, find_capacity
    from cosytriton_loadtests.limits import Limits
    from cosytriton_loadtests.run import LoadOptions

    base = LoadOptions(**_given(args, LOAD))
    options = CapacityOptions(Bracket(**_given(args, SEARCH)), base.seconds)
    found = find_capacity(base, Limits.read(args.limits), _folder(args), options)
    missed = "" if found.missed is None else f", and misses them at {found.missed:.3g}"
    log.info("the server keeps its limits at %.3g requests/s%s", found.rate, missed)
    return 0


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_arguments(parser)
    _limits_argument(parser)
    _add(parser, PLAN, "rate")


def _plan(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.limits import Limits
    from cosytriton_loadtests.planner.planning import PlanOptions, make_plan

    options = PlanOptions(limits=Limits.read(args.limits), **_given(args, PLAN))
    for line in make_plan(options, _folder(args)).lines():
        log.info("%s", line)
    return 0


def _inputs_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_arguments(parser)
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC")


def _inputs(args: argparse.Namespace) -> int:
    from cosytriton_loadtests.perf_analyzer import write_inputs

    folder = _folder(args)
    for one in write_inputs(args.repository, folder, args.url):
        log.info("%s", one.command)
    log.info("all of them, to be run where perf_analyzer is: %s", folder)
    return 0


def _shadow_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "present", help="host:port of gRPC of the present server; with --repository, its profile"
    )
    parser.add_argument("candidate", help="the same of what may replace it")
    parser.add_argument("--repository", type=Path, help="serve both profiles of it here, one after the other")
    parser.add_argument("--workload", type=Path, help="TOML file with the mix of requests")
    parser.add_argument("--count", type=int, default=12, help="inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same inputs")
    parser.add_argument("--judges", action="store_true", help="let a recogniser and a speaker encoder listen")
    parser.add_argument("--out", type=Path, default=FOLDER / "shadow.md", help="(default: %(default)s)")


def _shadow(args: argparse.Namespace) -> int:
    from cosytriton_loadtests import shadow
    from cosytriton_loadtests.judges import Judges
    from cosytriton_loadtests.workload import DEFAULT_WORKLOAD
    from cosytriton_loadtests.workload_file import read_workload

    workload, pair = read_workload(args.workload or DEFAULT_WORKLOAD), (args.present, args.candidate)
    options = {"seed": args.seed, "judges": Judges() if args.judges else None}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.repository:
        verdict = shadow.evaluate_profiles(
            args.repository, pair, workload, args.out.parent, args.count, **options
        )
    else:
        verdict = shadow.evaluate(*pair, workload, args.count, **options)
    args.out.write_text(verdict.markdown(), encoding="utf-8")
    log.info("%s: %s", args.out, verdict.reason)
    return verdict.exit_code


ACTIONS = {
    "run": Command("put load on a server, judge it, write the report", _run_arguments, _run),
    "judge": Command("judge a run that has taken place, and write its report", _again_arguments, _again),
    "compare": Command("say what differs beyond the noise between two runs", _compare_arguments, _compare),
    "capacity": Command("find the highest rate that keeps the limits", _capacity_arguments, _capacity),
    "plan": Command("how many replicas a rate takes, and how to scale them", _plan_arguments, _plan),
    "shadow": Command(
        "compare two servers and say whether to promote the new one", _shadow_arguments, _shadow
    ),
    "perf-analyzer": Command("write perf_analyzer's input for each native stage", _inputs_arguments, _inputs),
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, action in ACTIONS.items():
        sub = actions.add_parser(name, help=action.help, description=action.help)
        action.arguments(sub)
        sub.set_defaults(action=action.run)


LOADTEST = Command(
    "put a server under load, judge it by limits, plan its capacity",
    _arguments,
    lambda args: int(args.action(args)),
)
