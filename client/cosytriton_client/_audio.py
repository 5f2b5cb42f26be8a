"""Audio: what the server speaks, and files in and out.

WAV is read and written by the standard library; other formats by soundfile where it is installed.
"""

from __future__ import annotations

import os
import tempfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cosytriton_client._errors import InvalidInputError, UnsupportedError

Samples = npt.NDArray[np.float32]

SILENCE = 1e-3  # peak of an audio that holds no speech (-60 dB of full scale)


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Spoken audio: all of it, or one chunk of a stream.

    Attributes:
        samples: float32 [n], mono, in [-1, 1].
        token_count: the speech tokens that it was made from.
        sample_rate: Hz.
        finish_reason: why the speech, or the sentence of this chunk, ended: "end", "length" (its limit),
            "repetition" or "silence" (the model ran away and was stopped); "" while it goes on.
    """

    samples: Samples
    token_count: int
    sample_rate: int
    finish_reason: str = "end"

    @property
    def seconds(self) -> float:
        """The duration."""
        return len(self.samples) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a 16-bit PCM WAV file; it appears complete or not at all."""
        write_wav(Path(path), self.samples, self.sample_rate)


def write_wav(path: Path, samples: Samples, sample_rate: int) -> None:
    """Write float32 [n] in [-1, 1] as mono 16-bit PCM; atomic."""
    pcm = np.round(np.clip(samples, -1, 1) * 32767).astype("<i2")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written ({error.strerror}).") from error
    try:
        with os.fdopen(handle, "wb") as file, wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(sample_rate)
            out.writeframes(pcm.tobytes())
        Path(name).chmod(0o666 & ~_umask())  # a temporary file is private, what the user asked for is not
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_audio(path: Path) -> tuple[Samples, int]:
    """Read an audio file: float32 [n, channels] in [-1, 1], and its rate in Hz."""
    if not path.is_file():
        raise InvalidInputError(f"{path}: there is no such audio file.")
    if path.stat().st_size == 0:
        raise InvalidInputError(f"{path}: the file is empty.")
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            return _from_pcm(file.readframes(frames), width).reshape(-1, channels), rate
    except (wave.Error, EOFError, ValueError) as error:  # not a WAV file, or not one of integer PCM
        return _read_with_soundfile(path, error)


def _from_pcm(data: bytes, width: int) -> Samples:
    """Integer PCM of 1 to 4 bytes -> float32 [n] in [-1, 1)."""
    if width == 1:  # 8-bit WAV is unsigned
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return (wide.view("<i4").ravel() / 2.0**31).astype(np.float32)
    return (np.frombuffer(data, f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _read_with_soundfile(path: Path, reason: Exception) -> tuple[Samples, int]:
    try:
        import soundfile
    except ImportError:
        raise UnsupportedError(
            f"{path}: not a WAV file of 8, 16, 24 or 32-bit PCM ({reason}). "
            "Convert it, or install 'cosytriton[audio]' to read FLAC, OGG, MP3 and other WAV files."
        ) from reason
    try:
        data: Any
        data, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise InvalidInputError(f"{path}: cannot be read as audio ({error}).") from error
    return data, int(rate)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
