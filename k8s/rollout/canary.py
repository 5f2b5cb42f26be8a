"""Gives a canary more and more of the requests, or none again, as a load test and a shadow evaluation say.

    python k8s/rollout/canary.py promote --route tts-cosytriton --canary next-cosytriton \
        --stable-url tts-cosytriton.speech:8001 --canary-url next-cosytriton.speech:8001 \
        -- --seconds 300 --loop open --rate 2
    python k8s/rollout/canary.py rollback --route tts-cosytriton --canary next-cosytriton

What stands behind `--` are options of `cosytriton loadtest run`. Needs `cosytriton[loadtest]`, and a kubectl
that may read and patch the GRPCRoute. Exit status: 0 promoted (or rolled back, when that was asked for), 1
rolled back because of a verdict, 2 an error; the canary then has no requests either, unless the message
says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_ensemble.errors import CosytritonError

log = logging.getLogger("canary")

WEIGHTS = (10, 50, 100)  # percent of the requests, one step after another
Operation = dict[str, Any]


class CanaryError(CosytritonError):
    """A program that cannot be run, or a route that does not know the canary."""


class Rejected(CosytritonError):  # noqa: N818  (a verdict, not a failure)
    """The canary is not as good as it has to be."""


@dataclass(frozen=True, slots=True)
class Route:
    """A GRPCRoute that divides the requests between two Services.

    Attributes:
        name: of the GRPCRoute.
        stable, canary: names of the Services.
        kubectl: the program with its options for cluster and namespace.
    """

    name: str
    stable: str
    canary: str
    kubectl: tuple[str, ...] = ("kubectl",)

    def weigh(self, percent: int) -> None:
        """Give the canary this share of the requests, and the stable Service the rest.

        Raises:
            CanaryError: kubectl failed, or the route has no such Services.
        """
        route = json.loads(_output([*self.kubectl, "get", "grpcroute", self.name, "--output=json"]))
        patch = json.dumps(self.patch(route, percent))
        _output([*self.kubectl, "patch", "grpcroute", self.name, "--type=json", f"--patch={patch}"])
        log.info("%s has %d %% of the requests of %s", self.canary, percent, self.name)

    def patch(self, route: Mapping[str, Any], percent: int) -> list[Operation]:
        """The JSON patch (RFC 6902); it fails where the route was changed after it had been read."""
        weights = {self.stable: 100 - percent, self.canary: percent}
        found = [
            (f"/spec/rules/{i}/backendRefs/{j}", backend["name"])
            for i, rule in enumerate(route["spec"]["rules"])
            for j, backend in enumerate(rule.get("backendRefs", []))
        ]
        if missing := set(weights) - {name for _, name in found}:
            raise CanaryError(
                f"The GRPCRoute {self.name} has no backend {' and no '.join(sorted(missing))}, but "
                f"{', '.join(sorted({name for _, name in found}))}. The stable release's value "
                "gateway.canary.service names the canary's Service."
            )
        return [
            operation
            for path, name in found
            if name in weights
            for operation in (
                {"op": "test", "path": f"{path}/name", "value": name},
                {"op": "add", "path": f"{path}/weight", "value": weights[name]},
            )
        ]


def promote(
    route: Route, weights: Sequence[int], compare: Callable[[], None], load: Callable[[int], None]
) -> None:
    """Compare the two, then give the canary each weight and put it under load.

    Args:
        route: where the requests are divided.
        weights: percent, ascending.
        compare: raises `Rejected` when the canary speaks otherwise than the stable release.
        load: the same when it does not keep its limits; gets the weight.

    Raises:
        Rejected: the canary has no requests any more.
        CanaryError: the same, unless the message says that the route could not be reached.
    """
    route.weigh(0)  # says at once when it cannot be reached
    try:
        compare()
        for percent in weights:
            route.weigh(percent)
            load(percent)
    except BaseException as error:  # an interrupt too leaves no listener with a canary that nobody watches
        try:
            route.weigh(0)
        except CanaryError as failed:
            raise CanaryError(f"{failed} {route.canary} may still have requests: roll it back.") from error
        raise


def shadow(stable_url: str, canary_url: str) -> None:
    """Raise `Rejected` unless the shadow evaluation finds the two equally good."""
    if not _verdict(["cosytriton", "loadtest", "shadow", stable_url, canary_url]):
        raise Rejected(f"{canary_url} does not speak as {stable_url} does")


def load_test(url: str, folder: Path, options: Sequence[str]) -> None:
    """Raise `Rejected` unless the limits are kept under load; the report lies in the folder."""
    if not _verdict(["cosytriton", "loadtest", "run", str(folder), "--url", url, *options]):
        raise Rejected(f"{url} misses its limits; see {folder}")


def _verdict(command: Sequence[str]) -> bool:
    """Whether a command of the load test says yes (0) or no (1). CanaryError when it can say neither."""
    status = _run(command).returncode
    if status > 1 or status < 0:
        raise CanaryError(
            f"`{' '.join(command)}` ended with status {status}: nothing is known about the canary."
        )
    return status == 0


def _output(command: Sequence[str]) -> str:
    done = _run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise CanaryError(f"`{' '.join(command)}` ended with status {done.returncode}.")
    return str(done.stdout)


def _run(command: Sequence[str], stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdout=stdout, text=True, check=False)
    except OSError as error:
        raise CanaryError(f"{command[0]} cannot be run ({error.strerror}): it must be on PATH.") from error


def _percent(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: allowed are 1 to 100")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="canary.py", description="Promote a canary, or roll it back.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text in (
        ("promote", "step by step, as long as it is good"),
        ("rollback", "to no request at all"),
    ):
        sub = actions.add_parser(action, help=text)
        sub.add_argument("--route", required=True, help="name of the GRPCRoute")
        sub.add_argument("--stable", help="Service of the stable release (default: named as the route)")
        sub.add_argument("--canary", required=True, help="Service of the canary")
        sub.add_argument("--namespace", help="default: that of kubectl's context")
        sub.add_argument("--context", help="of kubectl")
    steps = actions.choices["promote"]
    steps.add_argument(
        "--stable-url", required=True, help="HOST:PORT of the stable Service, not of the gateway"
    )
    steps.add_argument("--canary-url", required=True, help="HOST:PORT of the canary's")
    steps.add_argument("--weights", type=_percent, nargs="+", default=WEIGHTS, help="percent (10 50 100)")
    steps.add_argument("--folder", type=Path, default=Path("build/canary"), help="for reports (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action; see the module's docstring for the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = list(sys.argv[1:] if argv is None else argv)
    own, options = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    args = _parser().parse_args(own)
    where = [f"--{name}={getattr(args, name)}" for name in ("namespace", "context") if getattr(args, name)]
    route = Route(args.route, args.stable or args.route, args.canary, ("kubectl", *where))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a pipeline that is cancelled rolls back too
    try:
        if args.action == "rollback":
            route.weigh(0)
        else:
            promote(
                route,
                sorted(args.weights),
                lambda: shadow(args.stable_url, args.canary_url),
                lambda percent: load_test(args.canary_url, args.folder / f"{percent}-percent", options),
            )
    except (CosytritonError, KeyboardInterrupt) as error:
        log.error("canary.py: %s", error if str(error) else "interrupted")
        return 1 if isinstance(error, Rejected) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
