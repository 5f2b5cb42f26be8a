"""A voice from files of several formats and from arrays; each refusal says why."""

from __future__ import annotations

import builtins
import hashlib
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from cosytriton_client import InvalidInputError, UnsupportedError, Voice
from cosytriton_client._audio import Samples
from cosytriton_ensemble.errors import CosytritonError, InputError

PCM = {
    1: 1 / 128,
    2: 1 / 2**15,
    3: 1 / 2**23,
    4: 1e-7,
}  # bytes a sample -> one step (float32 limits the last)


def write_pcm(path: Path, samples: Samples, width: int, rate: int = 16_000, channels: int = 1) -> Path:
    """Integer PCM through the standard library: an implementation apart from the client's."""
    wide = np.round(samples * (2.0 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        data = b"".join(int(v).to_bytes(width, "little", signed=width > 1) for v in wide.ravel())
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", PCM)
def test_wav_of_every_width(tmp_path: Path, samples: Samples, width: int) -> None:
    voice = Voice.from_wav(write_pcm(tmp_path / "a.wav", samples, width), "x")
    assert voice.audio.dtype == np.float32
    assert (voice.sample_rate, voice.seconds) == (16_000, 1.0)
    np.testing.assert_allclose(voice.audio, samples, atol=1.5 * PCM[width])


def test_stereo_becomes_the_mean(tmp_path: Path, samples: Samples) -> None:
    stereo = np.stack([samples, samples * 0.5], 1)  # [n, 2]
    voice = Voice.from_wav(write_pcm(tmp_path / "a.wav", stereo, 2, 44_100, 2), "x")
    assert voice.sample_rate == 44_100
    np.testing.assert_allclose(voice.audio, samples * 0.75, atol=PCM[2])
    np.testing.assert_array_equal(Voice(stereo, 44_100, "x").audio, stereo.mean(1))


@pytest.mark.parametrize(
    ("name", "subtype"), [("a.flac", "PCM_16"), ("a.wav", "FLOAT"), ("a.wav", "ULAW"), ("a.ogg", "VORBIS")]
)
def test_other_formats_through_soundfile(tmp_path: Path, samples: Samples, name: str, subtype: str) -> None:
    soundfile.write(tmp_path / name, samples, 16_000, subtype=subtype)
    voice = Voice.from_wav(tmp_path / name, "x")
    np.testing.assert_allclose(voice.audio, samples, atol=0.05)


def test_other_formats_without_soundfile_name_the_extra(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(tmp_path / "a.flac", samples, 16_000)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "soundfile":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"not a WAV file .*cosytriton\[audio\]"):
        Voice.from_wav(tmp_path / "a.flac", "x")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.wav: there is no such audio file"):
        Voice.from_wav(tmp_path / "none.wav", "x")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    with pytest.raises(InvalidInputError, match=r"a\.wav: the file is empty"):
        Voice.from_wav(tmp_path / "a.wav", "x")


@pytest.mark.parametrize("content", [b"no audio at all", b"RIFF\x24\x00\x00\x00WAVEfmt "])
def test_a_file_that_is_no_audio(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"a\.wav: cannot be read as audio"):
        Voice.from_wav(tmp_path / "a.wav", "x")


def test_a_wav_without_samples(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"a\.wav: reference audio of 0 s"):
        Voice.from_wav(write_pcm(tmp_path / "a.wav", np.zeros(0, np.float32), 2), "x")


@pytest.mark.parametrize(
    ("change", "rate", "transcript", "message"),
    [
        (lambda a: a, 8_000, "x", "of 8000 Hz: .* 16 kHz or more"),
        (lambda a: a[:3_999], 16_000, "x", "of 0.2499 s: allowed are 0.25 to 30 s"),
        (lambda a: np.tile(a, 31), 16_000, "x", "of 31 s: allowed are 0.25 to 30 s"),
        (lambda a: np.where(np.arange(len(a)) == 9, np.nan, a), 16_000, "x", "NaN or infinite"),
        (lambda a: a * 0, 16_000, "x", "silent"),
        (lambda a: a * 1e-4, 16_000, "x", "silent"),
        (lambda a: a * 32_768, 16_000, "x", r"scale the samples to \[-1, 1\]"),
        (
            lambda a: (a * 32_767).astype(np.int16),
            16_000,
            "x",
            "int16: give floats .*divide int16 samples by 32768",
        ),
        (lambda a: np.stack([a, a]), 16_000, "x", r"shape \[2, 16000\]: give \[n\] or \[n, channels\]"),
    ],
)
def test_what_is_no_voice_is_refused(
    samples: Samples, change: Callable[[Any], Any], rate: int, transcript: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Voice(change(samples), rate, transcript)


def test_the_limits_themselves_are_allowed(samples: Samples) -> None:
    assert Voice(samples[:4_000], 16_000, "x").seconds == 0.25
    assert Voice(np.tile(samples, 30), 16_000, "x").seconds == 30


def test_a_little_overshoot_is_clipped(samples: Samples) -> None:
    assert np.abs(Voice(samples * 2.5, 16_000, "x").audio).max() == 1


def test_a_refusal_from_a_file_names_the_file(tmp_path: Path, samples: Samples) -> None:
    with pytest.raises(InvalidInputError, match=r"a\.wav: reference audio is silent"):
        Voice.from_wav(write_pcm(tmp_path / "a.wav", samples * 0, 2))


def test_a_refusal_is_an_input_error_of_the_project(samples: Samples) -> None:
    with pytest.raises(InputError) as caught:
        Voice(samples, 1, "x")
    assert isinstance(caught.value, CosytritonError)


def test_the_digest_is_of_content_and_rate(samples: Samples) -> None:
    voice = Voice(samples, 16_000, "x")
    assert voice.digest == hashlib.sha256(b"16000 Hz\n" + samples.tobytes()).hexdigest()
    assert voice.digest == Voice(samples.astype(np.float64)[:, None], 16_000, "y").digest
    assert len({voice.digest, Voice(samples, 16_001, "x").digest, Voice(-samples, 16_000, "x").digest}) == 3


def test_a_voice_does_not_change_with_the_callers_array(samples: Samples) -> None:
    mine = samples.copy()
    voice = Voice(mine, 16_000, "x")
    mine[:] = 0
    np.testing.assert_array_equal(voice.audio, samples)
