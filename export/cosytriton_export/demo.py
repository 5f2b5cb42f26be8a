"""The demonstration: from a checkpoint to a spoken sentence through a real server, with the figures."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.repository import write_repository
from cosytriton_ensemble.server import ServerOptions, free_ports
from cosytriton_ensemble.supervisor import Supervisor
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.exporter import export_checkpoint
from cosytriton_export.parity import format_table

log = logging.getLogger(__name__)

TEXT = "Good evening, please wait for your server."
SEED = 0
PROMPT = "slt_1"  # one of the demo voice's own prompts; it clones no others


@dataclass(frozen=True, slots=True)
class Speaker:
    """What the demonstration says, and in whose voice."""

    text: str
    voice: Path
    transcript: str


def default_speaker(demo_voice: Path) -> Speaker:
    """The demo's sentence in one of the demo voice's own voices."""
    voice = demo_voice / "prompts" / f"{PROMPT}.wav"
    return Speaker(TEXT, voice, voice.with_suffix(".txt").read_text(encoding="utf-8").strip())


def run_demo(checkpoint: Checkpoint, speaker: Speaker, build: Path, outputs: Path, workers: int) -> str:
    """Export to `build`, serve, speak to `outputs`/demo.wav and demo_stream.wav; returns the table."""
    repository = build / "model_repository"
    rows = export_checkpoint(checkpoint, repository, workers=workers)
    write_repository(repository, checkpoint.family)
    with _serving(repository) as (url, version):
        unary = _speak(speaker, url, outputs / "demo.wav")
        streamed = _speak(speaker, url, outputs / "demo_stream.wav", "--stream")
    return "\n".join(
        (
            format_table(rows, untrained=checkpoint.untrained),
            f"\nTriton {version} (read from the running server)",
            _figures(outputs / "demo.wav", unary),
            _figures(outputs / "demo_stream.wav", streamed),
        )
    )


@contextmanager
def _serving(repository: Path) -> Iterator[tuple[str, str]]:
    """A server on free ports of this machine: its gRPC address and its version."""
    grpc_port, http_port, metrics_port = free_ports(3)
    options = ServerOptions(repository, grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    ready, versions = threading.Event(), [""]
    failures: list[ServerError] = []

    def announce(version: str) -> None:
        versions[0] = version
        ready.set()

    def run() -> None:
        try:
            supervisor.run()
        except ServerError as error:
            failures.append(error)
        ready.set()

    supervisor = Supervisor(options, announce)
    thread = threading.Thread(target=run)
    log.info("starting Triton")
    thread.start()
    try:
        ready.wait()
        if failures:
            raise failures[0]
        yield options.grpc_url, versions[0]
    finally:
        supervisor.stop()
        thread.join()


def _speak(speaker: Speaker, url: str, out: Path, *flags: str) -> dict[str, Any]:
    """Run `cosytriton speak` as a user would; its figures."""
    console = str(Path(sys.executable).with_name("cosytriton"))
    command = [console, "speak", speaker.text, "--json", *flags]
    options = {
        "--voice": speaker.voice,
        "--transcript": speaker.transcript,
        "--seed": SEED,
        "--out": out,
        "--url": url,
    }
    arguments = [str(part) for option in options.items() for part in option]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ServerError("The demonstration could not be spoken; the reason stands above.")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _figures(path: Path, figures: dict[str, Any]) -> str:
    return (
        "{path}: {audio_seconds:.2f} s from {speech_tokens} speech tokens, first audio after "
        "{first_audio_ms:.0f} ms, RTF {rtf:.2f}".format(path=path, **figures)
    )
