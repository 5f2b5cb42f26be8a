"""Recordings and texts for calibration: what is read, left out, and warned about."""

from __future__ import annotations

import re
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cosytriton_engines.calibration.builtin_set import ARCHIVE, builtin_set
from cosytriton_engines.calibration.material import CalibrationError, read_material, speaker_warnings
from cosytriton_ensemble.spec import Array

RATE = 16_000  # Hz


def voice_like(seconds: float, level: float = 0.3) -> Array:
    """A buzz with a pitch, which passes for speech."""
    time = np.arange(round(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 6)]
    return np.asarray(level * np.sum(tones, axis=0))


def write_wav(path: Path, audio: Array, rate: int = RATE, channels: int = 1) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.clip(np.round(audio * 32767), -32768, 32767).astype("<i2").tobytes())
    return path


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with one good recording, and a file of texts."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    write_wav(folder / "good.wav", voice_like(4))
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join([f"Sentence {i}." for i in range(20)] + ["你好。"]), encoding="utf-8")
    return folder, texts


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "too short": (lambda path: write_wav(path, voice_like(0.1)), "0.10 s long"),
    "too long": (lambda path: write_wav(path, voice_like(31)), "31.00 s long"),
    "silent": (lambda path: write_wav(path, voice_like(4, level=0)), "is silent"),
    "telephone": (lambda path: write_wav(path, voice_like(4), rate=8000), "8000 Hz"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as audio|no 16-bit WAV"),
    "no audio": (lambda path: path.write_text("hello"), "cannot be read as audio|no 16-bit WAV"),
    "a folder": (lambda path: path.mkdir(), "directory"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_recording_is_left_out_and_told_of(good: tuple[Path, Path], kind: str) -> None:
    make, reason = BAD[kind]
    make(good[0] / "bad.wav")
    found = read_material(*good)
    assert [recording.name for recording in found.recordings] == ["good.wav"]
    assert "bad.wav" not in found.digests
    (warning,) = (warning for warning in found.warnings if warning.startswith("bad.wav"))
    assert re.search(reason, warning)
    (good[0] / "good.wav").unlink()
    with pytest.raises(
        CalibrationError, match=f"No recording in .* can be used. bad.wav is left out.*({reason})"
    ):
        read_material(*good)


def test_stereo_is_heard_as_its_mean(good: tuple[Path, Path]) -> None:
    left = voice_like(4)
    write_wav(good[0] / "good.wav", np.stack([left, np.zeros_like(left)], axis=1), channels=2)
    (recording,) = read_material(*good).recordings
    np.testing.assert_allclose(recording.audio, left / 2, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "holds no text"), (b" \n\n", "holds no text"), ("schön".encode("latin-1"), "not UTF-8")],
)
def test_texts_that_cannot_be_read(good: tuple[Path, Path], content: bytes, reason: str) -> None:
    good[1].write_bytes(content)
    with pytest.raises(CalibrationError, match=reason):
        read_material(*good)


def test_material_that_is_not_there(good: tuple[Path, Path], tmp_path: Path) -> None:
    folder, texts = good
    with pytest.raises(CalibrationError, match="is not a folder"):
        read_material(tmp_path / "none", texts)
    with pytest.raises(CalibrationError, match="No such file"):
        read_material(folder, tmp_path / "none")
    (folder / "good.wav").unlink()
    with pytest.raises(CalibrationError, match="holds no recording; allowed are .wav"):
        read_material(folder, texts)


def test_material_that_shows_too_little_is_warned_about(good: tuple[Path, Path]) -> None:
    folder, texts = good
    texts.write_text("Hello there.\nGoodbye.")
    write_wav(folder / "loud.wav", voice_like(4, level=3))
    warnings = "\n".join(read_material(folder, texts).warnings)
    for reason in ("8 s of speech", "2 texts", r"one language \(en\)", "loud.wav: .* clipped"):
        assert re.search(reason, warnings), reason


def test_one_speaker_is_heard_by_the_embeddings() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 192))
    assert "one recording" in speaker_warnings([one])[0]
    assert "one speaker" in speaker_warnings([one, one + 0.2 * other, 3 * one])[0]
    assert speaker_warnings([one, other, one]) == []


def test_the_built_in_material_is_fit(tmp_path: Path) -> None:
    assert ARCHIVE.stat().st_size < 1_000_000
    with builtin_set() as (recordings, texts):
        found = read_material(recordings, texts)
        assert (recordings.parent / "NOTICE").is_file()
    assert found.warnings == ()
    assert len(found.texts) == 40
    assert len(found.recordings) == 7
    (tmp_path / "set.tar.xz").write_bytes(ARCHIVE.read_bytes()[:-1])
    with (
        pytest.raises(CalibrationError, match="Install the package again"),
        builtin_set(tmp_path / "set.tar.xz"),
    ):
        pass
