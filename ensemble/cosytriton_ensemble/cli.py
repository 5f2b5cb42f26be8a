"""The console command `cosytriton`: subcommands are entry points, so each package brings its own."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from cosytriton_ensemble.errors import CosytritonError

GROUP = "cosytriton.commands"


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. Its module stays light: what is heavy is imported inside `run`."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; an expected error becomes one line on stderr and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    points = {point.name: point for point in entry_points(group=GROUP)}
    # Only the subcommand that runs is imported, so that `speak` does not wait for torch.
    chosen = [points[name] for name in arguments[:1] if name in points] or list(points.values())
    parsed = _parser(chosen).parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (CosytritonError, OSError) as error:  # a full disk, a folder that may not be written
        sys.stderr.write(f"cosytriton: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(points: Sequence[EntryPoint]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cosytriton", description="From a CosyVoice checkpoint to speech served by NVIDIA Triton."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for point in sorted(points, key=lambda p: p.name):
        command: Command = point.load()
        sub = subparsers.add_parser(point.name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
