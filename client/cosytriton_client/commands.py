"""`cosytriton speak`: text to a WAV file through a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.modes import Mode

if TYPE_CHECKING:
    from cosytriton_client import Audio, Client, Voice

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".m4a")  # else --voice is the name of an enrolled voice


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", help="what to say; - reads it from standard input while it comes")
    parser.add_argument("--voice", required=True, help="reference audio (0.25 to 30 s, >= 16 kHz), or a name")
    parser.add_argument("--transcript", default="", help="what is said in the reference audio")
    parser.add_argument("--instruction", help="how to speak (CosyVoice2 and 3: ends with <|endofprompt|>)")
    parser.add_argument(
        "--source", type=Path, help="audio whose words to say in the voice, instead of a text"
    )
    parser.add_argument("--mode", choices=get_args(Mode), help="default: the one that the inputs mean")
    parser.add_argument("--speed", type=float, help="0.5 to 2.0")
    parser.add_argument("--as-written", action="store_true", help="do not spell numbers and signs out")
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
    parser.add_argument(
        "--tls", type=Path, metavar="DIR", help="gRPC with TLS: ca.crt, tls.crt, tls.key in DIR"
    )


def _run(args: argparse.Namespace) -> int:
    from cosytriton_client import Client, InvalidInputError, Voice

    if (args.text is None) == (args.source is None):
        raise InvalidInputError("give a text, or --source with the audio to convert.")
    path = Path(args.voice)
    recorded = path.is_file() or path.suffix.lower() in AUDIO_SUFFIXES
    voice = Voice.from_wav(path, args.transcript) if recorded else args.voice
    with Client(args.url, tls=args.tls) as client:
        if isinstance(voice, Voice):
            client.encode(voice)  # once for each voice, so it is no part of the figures
        start = time.perf_counter()
        audio, first, chunks = _collected(_speech(client, voice, args), start)
        wall = time.perf_counter() - start
    audio.save(args.out)
    figures: dict[str, float | str] = {
        "audio_seconds": audio.seconds,
        "speech_tokens": audio.token_count,
        "chunks": chunks,
        "finish_reason": audio.finish_reason,
        "first_audio_ms": first * 1000,
        "wall_ms": wall * 1000,
        "rtf": wall / audio.seconds,  # real-time factor: below 1 is faster than it sounds
    }
    sys.stdout.write((json.dumps(figures) if args.json else f"{args.out}: {_sentence(figures)}") + "\n")
    return 0


def _speech(client: Client, voice: Voice | str, args: argparse.Namespace) -> Iterable[Audio]:
    from cosytriton_client import Options, Voice

    options = Options(seed=args.seed, normalise=not args.as_written)
    if args.speed is not None:
        options["speed"] = args.speed
    if args.mode is not None:
        options["mode"] = args.mode
    if args.instruction is not None:
        options["instruction"] = args.instruction
    if args.source is not None:
        source = Voice.from_wav(args.source)
        speak = client.convert_stream if args.stream else None
        return speak(source, voice, **options) if speak else [client.convert(source, voice, **options)]
    if args.text == "-":
        return client.stream(iter(sys.stdin.readline, ""), voice, **options)
    if args.stream:
        return client.stream(args.text, voice, **options)
    return [client.synthesize(args.text, voice, **options)]


def _sentence(figures: Mapping[str, float | str]) -> str:
    return (
        "{audio_seconds:.2f} s of audio, chunks: {chunks}, first after {first_audio_ms:.0f} ms, "
        "all after {wall_ms:.0f} ms, RTF {rtf:.3f}, ended by {finish_reason}".format_map(figures)
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
    reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason not in ("", "end")]
    tokens = sum(chunk.token_count for chunk in chunks)
    return Audio(samples, tokens, chunks[0].sample_rate, (reasons or ["end"])[0]), first, len(chunks)


SPEAK = Command("Speak a text with the voice of a recording.", _arguments, _run)
