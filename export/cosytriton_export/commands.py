"""The subcommands `cosytriton export`, `checkpoint` and `demo`."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE2, FAMILIES
from cosytriton_export.environment import prepare_torch

WORKERS = 2  # stages that are exported at a time; a full-size one takes up to 4 GB


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="directory of a checkpoint, or its hub id: org/name, modelscope:org/name"
    )
    parser.add_argument("--revision", help="commit of a checkpoint on a hub (default: its main branch's)")
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("model_repository"),
        help="model repository that receives the artifacts (default: %(default)s)",
    )
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="models to export (default: all)")


def _export(arguments: argparse.Namespace) -> int:
    prepare_torch()
    from cosytriton_ensemble.repository import write_repository
    from cosytriton_export.checkpoint import Checkpoint
    from cosytriton_export.exporter import export_checkpoint
    from cosytriton_export.hub import resolve
    from cosytriton_export.parity import format_table

    checkpoint = Checkpoint.open(resolve(arguments.checkpoint, arguments.revision))
    rows = export_checkpoint(checkpoint, arguments.repository, arguments.stages, workers=WORKERS)
    write_repository(arguments.repository, checkpoint.family)
    sys.stdout.write(format_table(rows, untrained=checkpoint.untrained) + "\n")
    return 0


def _write_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="new directory for the checkpoint")
    parser.add_argument(
        "--size",
        choices=("tiny", "full"),
        default="tiny",
        help="tiny, or full with the official shapes, 3.1 GB (default: %(default)s)",
    )
    parser.add_argument("--family", choices=FAMILIES, default=COSYVOICE2.name, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")


def _write(arguments: argparse.Namespace) -> int:
    prepare_torch()
    from cosytriton_export.writer import write_checkpoint

    log = logging.getLogger(__name__)
    family = FAMILIES[arguments.family]
    checkpoint = write_checkpoint(arguments.directory, arguments.size, arguments.seed, log.info, family)
    sys.stdout.write(f"{checkpoint.path}: an untrained checkpoint, its sound is noise\n")
    return 0


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint (default: the demo voice)")
    parser.add_argument("--text", help="what to say (default: a sentence that the demo voice can say)")
    parser.add_argument("--voice", type=Path, help="reference audio (default: a recording of the demo voice)")
    parser.add_argument("--transcript", help="what is said in the reference audio")
    parser.add_argument("--build", type=Path, default=Path("build/demo"), help="folder for what is built")


def _demo(arguments: argparse.Namespace) -> int:
    prepare_torch()
    from cosytriton_export.checkpoint import Checkpoint
    from cosytriton_export.demo import default_speaker, run_demo
    from cosytriton_export.demo_voice import unpack_demo_voice

    if (arguments.voice is None) != (arguments.transcript is None):
        raise InputError("--voice and --transcript belong together: give both, or neither.")
    demo_voice = unpack_demo_voice(arguments.build)
    checkpoint = Checkpoint.open(arguments.checkpoint or demo_voice)
    given = {name: getattr(arguments, name) for name in ("text", "voice", "transcript")}
    speaker = replace(default_speaker(demo_voice), **{k: v for k, v in given.items() if v is not None})
    table = run_demo(checkpoint, speaker, arguments.build, Path.cwd(), WORKERS)
    sys.stdout.write(table + "\n")
    return 0


EXPORT = Command("export a checkpoint into a model repository", _export_arguments, _export)
WRITE = Command("write an untrained checkpoint of the official layout", _write_arguments, _write)
DEMO = Command("export the demo voice, serve it, and let it speak", _demo_arguments, _demo)
