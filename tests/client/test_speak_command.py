"""`cosytriton speak` from arguments to a WAV file."""

from __future__ import annotations

import argparse
import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cosytriton_client
from cosytriton_client import Client, InvalidInputError
from cosytriton_client._audio import Samples
from cosytriton_client.commands import SPEAK


@pytest.fixture
def speak(
    transport: Any, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Runs the command in a folder with `ref.wav`; what it would ask a server is in `transport`."""
    cosytriton_client.Audio(samples, 0, 16_000).save(tmp_path / "ref.wav")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cosytriton_client, "Client", lambda url, **_: Client(url, transport=transport))

    def run(*words: Any) -> int:
        parser = argparse.ArgumentParser()
        SPEAK.arguments(parser)
        return SPEAK.run(parser.parse_args([*words, "--voice", "ref.wav", "--transcript", "said"]))

    return run


def test_speak_writes_a_file_and_its_figures(
    speak: Callable[..., int], transport: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speak("Hello.", "--out", "o.wav", "--seed", "5") == 0
    with wave.open("o.wav") as file:
        assert file.getnframes() == 2880
    out = capsys.readouterr().out
    figures = r"0\.12 s of audio, chunks: 1, first after \d+ ms, all after \d+ ms, RTF [\d.]+, ended by end"
    assert re.fullmatch(rf"o\.wav: {figures}\n", out)
    assert transport.models() == ["voice_encoder", "tts"]
    assert transport.requests[-1].inputs["seed"].item() == 5


def test_speak_streams_and_shows_progress(
    speak: Callable[..., int], transport: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speak("Hello.", "--stream") == 0
    with wave.open("speech.wav") as file:
        assert file.getnframes() == 2880
    out, err = capsys.readouterr()
    assert "chunks: 2" in out
    assert "chunk 1: 0.08 s" in err
    assert "chunk 2: 0.12 s" in err
    assert transport.models() == ["voice_encoder", "tts_stream"]


def test_speak_leaves_errors_to_the_console_command(speak: Callable[..., int]) -> None:
    with pytest.raises(InvalidInputError, match="text is empty"):
        speak("")
