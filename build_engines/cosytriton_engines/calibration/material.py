"""Calibration material: recordings of speech and texts, read, checked, and judged.

A folder holds recordings, each with its transcript in a `.txt` of the same name where there is one; a text
file holds one text a line. What cannot be used is left out with a warning.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cosytriton_ensemble.audio import Waveform, check_reference
from cosytriton_ensemble.errors import CosytritonError, InputError
from cosytriton_ensemble.quality import reference_warnings
from cosytriton_ensemble.spec import Array
from cosytriton_ensemble.text.language import language_of

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
MIN_SECONDS = 20.0  # of speech in all: below it a few sounds decide the ranges
MIN_TEXTS = 20
MAX_RECORDINGS = 24  # more teach little and each costs an encoder about a second at full size
# The least similar pair of recordings. Speaker verification with CAM++ accepts from 0.3 to 0.4 on, and the
# embeddings of one speaker lie well above.
ONE_SPEAKER = 0.6


Item = TypeVar("Item")


class CalibrationError(CosytritonError):
    """Calibration material that cannot be used, or a calibration set that cannot be trusted."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One person who speaks: audio FP32 [samples] in [-1, 1] at `rate` Hz."""

    name: str
    audio: Waveform
    rate: int
    transcript: str  # "" where it is not known

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.audio.size / self.rate


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """What a calibration set is made of; `digests` are the sha256 of the files, by name."""

    recordings: tuple[Recording, ...]
    texts: tuple[str, ...]
    digests: dict[str, str]
    warnings: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Reader:
    """Reads files, and remembers their digests and what was wrong with them."""

    digests: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def bytes(self, path: Path) -> bytes:
        data = path.read_bytes()
        self.digests[path.name] = hashlib.sha256(data).hexdigest()
        return data

    def text(self, path: Path) -> str:
        try:
            return self.bytes(path).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"it is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def read_material(recordings: Path, texts: Path) -> Material:
    """Read a folder of recordings and a file of texts.

    Raises `CalibrationError`: one of them is not there, or nothing in it can be used.
    """
    reader = _Reader()
    heard, said = _recordings(recordings, reader), _texts(texts, reader)
    return Material(tuple(heard), tuple(said), reader.digests, (*reader.warnings, *_judge(heard, said)))


def evenly_spaced(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` of the items, from the first to the last, at equal distances."""
    if len(items) <= limit:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, limit).round().astype(int)]


def _recordings(folder: Path, reader: _Reader) -> list[Recording]:
    if not folder.is_dir():
        raise CalibrationError(f"{folder} is not a folder; give one that holds recordings of speech.")
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in AUDIO_SUFFIXES]
    if not files:
        raise CalibrationError(
            f"{folder} holds no recording; allowed are {', '.join(AUDIO_SUFFIXES)}. Give a folder with a few "
            "recordings of 3 to 10 s, by several speakers."
        )
    chosen = evenly_spaced(files, MAX_RECORDINGS)
    if len(chosen) < len(files):
        reader.warnings.append(f"{len(chosen)} of the {len(files)} recordings are used, evenly spaced")
    found = []
    for path in chosen:
        try:
            found.append(_recording(path, reader))
        except (OSError, CosytritonError) as error:
            reader.digests.pop(path.name, None)
            reader.warnings.append(f"{path.name} is left out: {error}")
    if not found:
        raise CalibrationError(f"No recording in {folder} can be used. {' '.join(reader.warnings)}")
    return found


def _recording(path: Path, reader: _Reader) -> Recording:
    audio, rate = read_audio(path)
    check_reference(audio, rate)
    beside = path.with_suffix(".txt")
    transcript = reader.text(beside) if beside.is_file() else ""
    reader.bytes(path)
    return Recording(path.name, audio, rate, transcript)


def read_audio(path: Path) -> tuple[Waveform, int]:
    """Read a recording as mono FP32 [samples] in [-1, 1], and its rate in Hz.

    16-bit WAV is read by the standard library, all else by soundfile where it is installed. Raises
    `InputError` when the file cannot be read as audio.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            if width != 2:
                raise wave.Error(f"{8 * width} bits a sample")
            data: Array = np.frombuffer(file.readframes(frames), "<i2").reshape(-1, channels)
            audio: Waveform = (data.mean(axis=1) / 2**15).astype(np.float32)
            return audio, rate
    except (wave.Error, EOFError, ValueError) as error:
        return _read_with_soundfile(path, error)


def _read_with_soundfile(path: Path, reason: Exception) -> tuple[Waveform, int]:
    try:
        import soundfile
    except ImportError:
        raise InputError(
            f"it is no 16-bit WAV file ({reason}); convert it, or install 'cosytriton[audio]' to read FLAC, "
            "OGG, MP3 and other WAV files"
        ) from reason
    data: Any
    try:
        data, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise InputError(f"it cannot be read as audio ({error})") from error
    return data.mean(axis=1), int(rate)


def _texts(path: Path, reader: _Reader) -> list[str]:
    try:
        lines = [line.strip() for line in reader.text(path).splitlines()]
    except OSError as error:
        raise CalibrationError(f"The texts {path} cannot be read ({error.strerror}).") from error
    except InputError as error:
        raise CalibrationError(f"The texts {path} cannot be read: {error}.") from error
    if not any(lines):
        raise CalibrationError(f"{path} holds no text; write one sentence a line, of what will be spoken.")
    return [line for line in lines if line]


def _judge(recordings: Sequence[Recording], texts: Sequence[str]) -> list[str]:
    """Warn of material that can be used, but does not show the models what they will meet."""
    warnings = [f"{r.name}: {warning}" for r in recordings for warning in reference_warnings(r.audio, r.rate)]
    if (seconds := sum(r.seconds for r in recordings)) < MIN_SECONDS:
        warnings.append(f"there are {seconds:.0f} s of speech: give {MIN_SECONDS:g} s or more")
    if len(texts) < MIN_TEXTS:
        warnings.append(f"there are {len(texts)} texts: give {MIN_TEXTS} or more")
    if len(languages := {language_of(text) for text in texts}) == 1:
        warnings.append(f"all texts are in one language ({languages.pop()}): give each that will be spoken")
    return warnings


def speaker_warnings(embeddings: Sequence[Array]) -> list[str]:
    """Warn when all recordings are of one speaker, judged by their embeddings [width]."""
    if len(embeddings) == 1:
        return ["there is one recording: give several speakers"]
    directions = np.stack([e / np.linalg.norm(e) for e in embeddings])
    if (lowest := float((directions @ directions.T).min())) > ONE_SPEAKER:
        return [
            f"all recordings sound like one speaker (similarity {lowest:.2f} or more): give several speakers"
        ]
    return []
