"""Saved audio: 16-bit WAV that is complete or absent."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Audio, InvalidInputError
from cosytriton_client._audio import Samples


def test_save_writes_16_bit_mono(tmp_path: Path, samples: Samples) -> None:
    audio = Audio(np.append(samples, np.array([2, -2], np.float32)), 25, 24_000)
    audio.save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 24_000, 16_002)
        pcm = np.frombuffer(file.readframes(-1), "<i2")
    np.testing.assert_allclose(pcm / 32767, np.clip(audio.samples, -1, 1), atol=0.5 / 32767 + 1e-7)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.wav"
    target.write_bytes(b"old")

    class Broken(wave.Wave_write):
        def writeframes(self, _data: Any) -> None:
            raise OSError("disk full")

    monkeypatch.setattr(wave, "open", lambda file, _mode: Broken(file))
    with pytest.raises(OSError, match="disk full"):
        Audio(samples, 25, 24_000).save(target)
    assert [p.name for p in tmp_path.iterdir()] == ["a.wav"]
    assert target.read_bytes() == b"old"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, samples: Samples) -> None:
    with pytest.raises(InvalidInputError, match=r"none/a\.wav: cannot be written"):
        Audio(samples, 25, 24_000).save(tmp_path / "none" / "a.wav")
