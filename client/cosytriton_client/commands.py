"""`cosytriton speak`: text to a WAV file through a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cosytriton_ensemble.cli import Command

if TYPE_CHECKING:
    from cosytriton_client import Audio


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help="what to say")
    parser.add_argument("--voice", required=True, type=Path, help="reference audio, 0.25 to 30 s, >= 16 kHz")
    parser.add_argument("--transcript", required=True, help="what is said in the reference audio")
    parser.add_argument(
        "--out", type=Path, default=Path("speech.wav"), help="WAV file (default: %(default)s)"
    )
    parser.add_argument("--stream", action="store_true", help="receive the audio in chunks")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same samples")
    parser.add_argument(
        "--url",
        default="localhost:8001",
        help="host:port for gRPC or http://host:port (default: %(default)s)",
    )


def _run(args: argparse.Namespace) -> int:
    from cosytriton_client import Client, Voice

    voice = Voice.from_wav(args.voice, args.transcript)
    with Client(args.url) as client:
        client.encode(voice)  # once for each voice, so it is no part of the figures
        start = time.perf_counter()
        if args.stream:
            audio, first, chunks = _collected(client.stream(args.text, voice, args.seed), start)
        else:
            audio, chunks = client.synthesize(args.text, voice, args.seed), 1
            first = time.perf_counter() - start
        wall = time.perf_counter() - start
    audio.save(args.out)
    figures = {
        "audio_seconds": audio.seconds,
        "speech_tokens": audio.token_count,
        "chunks": chunks,
        "first_audio_ms": first * 1000,
        "wall_ms": wall * 1000,
        "rtf": wall / audio.seconds,  # real-time factor: below 1 is faster than it sounds
    }
    sys.stdout.write((json.dumps(figures) if args.json else f"{args.out}: {_sentence(figures)}") + "\n")
    return 0


def _sentence(figures: Mapping[str, float]) -> str:
    return (
        "{audio_seconds:.2f} s of audio, chunks: {chunks}, first after {first_audio_ms:.0f} ms, "
        "all after {wall_ms:.0f} ms, RTF {rtf:.3f}".format_map(figures)
    )


def _collected(stream: Iterable[Audio], start: float) -> tuple[Audio, float, int]:
    """All chunks as one audio, the seconds until the first one, and their number."""
    import numpy as np

    from cosytriton_client import Audio

    chunks: list[Audio] = []
    first = seconds = 0.0
    for chunk in stream:
        first = first or time.perf_counter() - start
        chunks.append(chunk)
        seconds += chunk.seconds
        sys.stderr.write(f"\rchunk {len(chunks)}: {seconds:.2f} s after {time.perf_counter() - start:.2f} s")
        sys.stderr.flush()
    sys.stderr.write("\n")
    samples = np.concatenate([chunk.samples for chunk in chunks])
    return Audio(samples, sum(chunk.token_count for chunk in chunks)), first, len(chunks)


SPEAK = Command("Speak a text with the voice of a recording.", _arguments, _run)
