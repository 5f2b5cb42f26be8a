"""`cosytriton voices`: enrol voices in the folder that a server reads, list, show and remove them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.names import VOICES_VARIABLE

log = logging.getLogger(__name__)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "show", "remove"))
    parser.add_argument("name", nargs="?", help="of the voice; not for list")
    parser.add_argument("audio", nargs="?", type=Path, help="reference audio; for add")
    parser.add_argument("--transcript", default="", help="what is said in it (without: cross-lingual only)")
    default = Path(os.environ.get(VOICES_VARIABLE, "voices"))
    parser.add_argument("--voices", type=Path, default=default, help="folder (default: %(default)s)")
    parser.add_argument("--replace", action="store_true", help="overwrite the voice of this name")
    parser.add_argument("--url", default="localhost:8001", help="server that encodes the audio")
    parser.add_argument("--tls", type=Path, metavar="DIR", help="gRPC with TLS: its files are in DIR")


def _run(args: argparse.Namespace) -> int:
    from cosytriton_client import InvalidInputError, UnsupportedError

    if find_spec("safetensors") is None:
        raise UnsupportedError("Voices are kept in safetensors files: install 'cosytriton[serve]'.")
    wanted = {"add": 2, "list": 0}.get(args.action, 1)
    if sum(value is not None for value in (args.name, args.audio)) != wanted:
        raise InvalidInputError(
            f"`voices {args.action}` takes {('nothing', 'a name', 'a name and audio')[wanted]}."
        )
    return {"add": _add, "list": _list, "show": _show, "remove": _remove}[args.action](args)


def _add(args: argparse.Namespace) -> int:
    from cosytriton_client import Client, Voice
    from cosytriton_ensemble import voice as ensemble
    from cosytriton_ensemble.quality import reference_warnings
    from cosytriton_ensemble.registry import VoiceFolder, check_name

    check_name(args.name)
    voice = Voice.from_wav(args.audio, args.transcript)
    for warning in reference_warnings(voice.audio, voice.sample_rate):
        log.warning("%s: %s", args.audio, warning)
    with Client(args.url, tls=args.tls) as client:
        encoded = client.encode(voice)
    feed = {name: array[0] for name, array in encoded.tensors().items()}
    stored = replace(ensemble.Voice.from_feed(feed), transcript=args.transcript.strip())
    folder = VoiceFolder(args.voices, encoded.checkpoint.item().decode())
    path = folder.add(args.name, stored, replace=args.replace)
    sys.stdout.write(f"{path}: enrolled; ask for it with --voice {args.name}\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.registry import enrolled

    sys.stdout.write("".join(f"{name}\n" for name in enrolled(args.voices)))
    return 0


def _show(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.registry import read_card

    card = asdict(read_card(args.voices, args.name))
    sys.stdout.write(json.dumps(card, indent=2, ensure_ascii=False) + "\n")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from cosytriton_ensemble.registry import remove

    remove(args.voices, args.name)
    return 0


VOICES = Command("Enrol voices for a server, list, show and remove them.", _arguments, _run)
