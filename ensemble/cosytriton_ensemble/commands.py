"""Subcommands of this package: `serve`, `health`, `repository`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE2, FAMILIES
from cosytriton_ensemble.names import THREADS_VARIABLE
from cosytriton_ensemble.profiles import CPU, PROFILES

if TYPE_CHECKING:
    from cosytriton_ensemble.server import ServerOptions

PARTS = ("all", "lm", "sound")

log = logging.getLogger(__name__)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repository", type=Path, default=Path("model_repository"))
    add("--voices", type=Path, help="folder of enrolled voices (default: beside it)")
    add(
        "--profile",
        choices=PROFILES,
        default=CPU.name,
        help="what is served, and on what (default: %(default)s)",
    )
    add("--threads", type=int, help="threads that each graph computes with (default: as doctor advises)")
    add(
        "--verify",
        action="store_true",
        help="refuse configurations and code in the repository that are not ours",
    )
    add(
        "--engines",
        type=Path,
        metavar="DIR",
        help="where `build --engines` has put the plans for this machine",
    )
    add("--engine-key", metavar="KEY", help="refuse to start where `build --key` prints another one")
    _network_arguments(parser)
    add("--log-level", choices=("error", "warning", "info", "verbose"), default="error")
    add(
        "--trace-config",
        action="append",
        default=[],
        metavar="SETTING",
        help="handed to Triton; may be repeated",
    )
    add("--exit-timeout", type=int, default=30, help="seconds for requests in flight at the end")
    add(
        "--part",
        choices=PARTS,
        default="all",
        help="what is loaded, where the language model has a server alone",
    )
    add("--lm-url", metavar="HOST:PORT", help="of the server with --part=lm, for --part=sound")


def _network_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address of gRPC (default: %(default)s)")
    add("--http-host", default="127.0.0.1", help="address of HTTP; Triton's parser is not for open networks")
    add("--metrics-host", help="address of metrics (default: that of gRPC)")
    add("--grpc-port", type=int, default=8001)
    add("--http-port", type=int, default=8000)
    add("--metrics-port", type=int, default=8002)
    add("--tls", type=Path, metavar="DIR", help="gRPC with TLS: tls.crt, tls.key and ca.crt lie in DIR")
    add("--mutual-tls", action="store_true", help="clients must show a certificate that DIR/ca.crt signed")
    add("--admin-key", type=Path, metavar="FILE", help="changing the server needs the key that FILE holds")


def _threads(asked: int | None) -> int:
    """What was asked for, or is set in the environment, or is advised."""
    from cosytriton_ensemble.advice import threads_for
    from cosytriton_ensemble.machine import Processor

    given = os.environ.get(THREADS_VARIABLE) if asked is None else str(asked)
    if not given:
        return threads_for(Processor.here().cores)
    if not given.isdecimal():
        raise InputError(f"{given!r} threads were asked for; give 1 or more, or 0 for every core.")
    return int(given)


def _options(args: argparse.Namespace) -> ServerOptions:
    from cosytriton_ensemble.server import ServerOptions
    from cosytriton_ensemble.tls import Tls

    if args.mutual_tls and args.tls is None:
        raise InputError("--mutual-tls needs --tls DIR with the certificates.")
    repository = args.repository
    if args.engines or args.engine_key:
        repository = _keyed_repository(repository, args.engines, args.engine_key)
    return ServerOptions(
        repository=repository,
        profile=args.profile,
        host=args.host,
        http_host=args.http_host,
        metrics_host=args.metrics_host,
        grpc_port=args.grpc_port,
        http_port=args.http_port,
        metrics_port=args.metrics_port,
        log_level=args.log_level,
        exit_timeout=args.exit_timeout,
        threads=_threads(args.threads),
        voices=args.voices,
        tls=args.tls and Tls(args.tls, args.mutual_tls),
        admin_key=args.admin_key,
        trace=tuple(args.trace_config),
        part=args.part,
        lm_url=args.lm_url,
    )


def _keyed_repository(repository: Path, engines: Path | None, pinned: str | None) -> Path:
    """The repository of this machine among the engines; the given one where only the key is pinned."""
    from cosytriton_ensemble.engine_store import check_key, engine_key, engine_repository

    key = engine_key(repository)
    check_key(key, pinned)
    return repository if engines is None else engine_repository(engines, key)


def _serve(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.machine import Processor
    from cosytriton_ensemble.profiles import CPU_INT8
    from cosytriton_ensemble.repository import check_repository, check_skeleton, is_untrained
    from cosytriton_ensemble.supervisor import Supervisor

    options = _options(args)

    def announce(version: str) -> None:
        log.info(
            "ready: Triton %s speaks at %s (gRPC), profile %s", version, options.grpc_url, options.profile
        )

    profile = PROFILES[options.profile]
    check_repository(options.repository, profile)
    if args.verify:
        check_skeleton(options.repository)
    if profile == CPU_INT8 and Processor.here().adds_int8_exactly is False:
        log.warning("this CPU adds INT8 products in 16 bits, which saturate: serve the profile cpu instead")
    if is_untrained(options.repository):
        log.warning("%s comes from an untrained checkpoint: its sound is noise", options.repository)
    supervisor = Supervisor(options, announce)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    log.info("starting Triton with %s", options.repository)
    supervisor.run()
    return 0


def _health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--ready", action="store_true", help="speak, instead of only asking every model")
    parser.add_argument("--deadline", type=float, default=30, help="seconds for all answers together")
    parser.add_argument(
        "--tls", type=Path, metavar="DIR", help="as of `serve`, or with the files of a client"
    )


def _health(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.health import HealthCheck

    check = HealthCheck(args.url, args.deadline, args.tls)
    check.ready() if args.ready else check.alive()
    log.info("well: every model at %s answers", args.url)
    return 0


def _repository_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repository", type=Path, nargs="?", default=Path("model_repository"))
    parser.add_argument("--family", choices=FAMILIES, default=COSYVOICE2.name)


def _repository(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.repository import write_repository

    write_repository(args.repository, FAMILIES[args.family])
    log.info("wrote the configurations of %s", args.repository)
    return 0


SERVE = Command("start the embedded Triton server and keep it serving", _serve_arguments, _serve)
HEALTH = Command("ask a running server to work; exit status 0 when it does", _health_arguments, _health)
REPOSITORY = Command(
    "write a model repository's configurations from the declarations", _repository_arguments, _repository
)
