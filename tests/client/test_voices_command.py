"""`cosytriton voices` and `cosytriton speak --voice NAME`, as they are typed, against a running server."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Voice
from cosytriton_client._audio import write_wav
from cosytriton_ensemble.cli import main
from cosytriton_ensemble.repository import checkpoint_of

DATA = Path(__file__).parents[1] / "data"
REFERENCE = DATA / "librivox_austen.wav"
TRANSCRIPT = REFERENCE.with_suffix(".txt").read_text().strip()
NOBODY = "localhost:1"  # where no server listens

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Run:
    """Runs a console command: exit status, what it prints, and what it reports."""
    caplog.set_level(logging.INFO)

    def command(*words: object) -> tuple[int, str, str]:
        caplog.clear()
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err + caplog.text

    return command


@pytest.fixture
def voices(demo_repository: Path) -> Iterator[Path]:
    """The folder that the server reads when it is told nothing else; what is enrolled goes at the end."""
    folder = demo_repository.parent / "voices"
    yield folder
    for file in folder.glob("*.safetensors"):
        file.unlink()


@pytest.fixture
def add(run: Run, server: Any, voices: Path) -> Run:
    """`voices add` with the server's address and folder."""
    return lambda *words: run("voices", "add", *words, "--voices", voices, "--url", server.grpc_url)


@pytest.fixture
def spoken(run: Run, server: Any, tmp_path: Path) -> Callable[..., bytes]:
    """The WAV file that `speak` writes."""

    def wav(*words: object) -> bytes:
        out = tmp_path / "out.wav"
        status, _, said = run(
            "speak", "This is voice number five.", *words, "--out", out, "--url", server.grpc_url
        )
        assert status == 0, said
        return out.read_bytes()

    return wav


@pytest.mark.parametrize("transcript", [TRANSCRIPT, ""])
@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_an_enrolled_voice_says_what_its_recording_says(
    add: Run, spoken: Callable[..., bytes], transcript: str, how: tuple[str, ...]
) -> None:
    words = ("--transcript", transcript)
    status, out, said = add("Élise 2", REFERENCE, *words)
    assert (status, said) == (0, "")
    assert "enrolled; ask for it with --voice Élise 2" in out
    assert spoken("--voice", "Élise 2", *how) == spoken("--voice", REFERENCE, *words, *how)


def test_a_voice_is_listed_shown_and_removed(
    add: Run, run: Run, voices: Path, server: Any, demo_repository: Path
) -> None:
    assert run("voices", "list", "--voices", voices) == (0, "", "")
    for name in ("bert", "anna"):
        assert add(name, REFERENCE, "--transcript", f" {TRANSCRIPT}\n")[0] == 0
    assert run("voices", "list", "--voices", voices)[:2] == (0, "anna\nbert\n")
    status, out, _ = run("voices", "show", "anna", "--voices", voices)
    card = json.loads(out)
    assert (status, card["name"], card["transcript"]) == (0, "anna", TRANSCRIPT)
    assert card["checkpoint"] == checkpoint_of(demo_repository)
    assert 70 < card["tokens"] < 90  # 3.3 s, 25 tokens a second
    assert run("voices", "remove", "anna", "--voices", voices)[0] == 0
    assert run("voices", "list", "--voices", voices)[:2] == (0, "bert\n")
    for action in ("show", "remove"):
        status, _, said = run("voices", action, "anna", "--voices", voices)
        assert status == 2
        assert "There is no voice 'anna'" in said
        assert "it holds bert" in said
    status, _, said = run("speak", "Hello.", "--voice", "anna", "--url", server.grpc_url)
    assert status == 2
    assert "There is no voice 'anna'. Present are: bert" in said


def test_a_name_is_overwritten_only_when_asked(add: Run, voices: Path) -> None:
    assert add("anna", REFERENCE, "--transcript", "one")[0] == 0
    for name, hint in (("anna", "give --replace to overwrite it"), ("Anna", "choose another one")):
        status, _, said = add(name, REFERENCE, "--transcript", "two")
        assert status == 2
        assert f"The name '{name}' is taken by the voice 'anna'; {hint}." in said
    assert add("anna", REFERENCE, "--transcript", "two", "--replace")[0] == 0
    (path,) = voices.iterdir()
    assert b'"transcript":"two"' in path.read_bytes()


def test_a_bad_recording_is_enrolled_with_a_warning(add: Run, tmp_path: Path) -> None:
    audio = Voice.from_wav(REFERENCE).audio[16_000:32_000].astype(np.float32)
    write_wav(tmp_path / "bad.wav", np.clip(audio * 30, -1, 1), 16_000)
    status, _, said = add("anna", "bad.wav")
    assert status == 0
    assert "bad.wav: it is 1.0 s long: record 3 to 10 s" in said
    assert "of its samples are clipped: record again with less gain" in said


@pytest.mark.parametrize("name", ["../anna", "a/b", "/anna", ".anna", "a\nb", "", "x" * 65, "\udcff"])
def test_a_name_is_no_path(run: Run, tmp_path: Path, name: str) -> None:
    for words in (("add", name, REFERENCE), ("show", name), ("remove", name)):
        status, _, said = run("voices", *words, "--voices", tmp_path / "voices", "--url", NOBODY)
        assert status == 2
        assert "cannot be the name of a voice" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add",), "`voices add` takes a name and audio."),
        (("add", "anna"), "`voices add` takes a name and audio."),
        (("list", "anna"), "`voices list` takes nothing."),
        (("show",), "`voices show` takes a name."),
        (("remove",), "`voices remove` takes a name."),
        (("remove", "anna", "b.wav"), "`voices remove` takes a name."),
        (("add", "anna", "nobody.wav"), "nobody.wav: there is no such audio file"),
        (("add", "anna", REFERENCE), "cannot reach a Triton server at grpc://localhost:1"),
    ],
)
def test_wrong_arguments(run: Run, words: tuple[object, ...], message: str) -> None:
    status, _, said = run("voices", *words, "--url", NOBODY)
    assert status == 2
    assert message in said


@pytest.mark.parametrize("words", [("rename", "anna"), (), ("add", "a", "b.wav", "c"), ("list", "--all")])
def test_unknown_words_end_with_the_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["voices", *words])
    assert ended.value.code == 2
    assert "usage: cosytriton" in capsys.readouterr().err


def test_a_transcript_that_is_no_unicode(add: Run, voices: Path) -> None:
    status, _, said = add("anna", REFERENCE, "--transcript", "\udcff")
    assert status == 2
    assert "transcript is not valid Unicode" in said
    assert not list(voices.glob("*"))


def test_what_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client alone installs without what reads and writes the files of voices."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    status, _, said = run("voices", "list")
    assert status == 2
    assert "install 'cosytriton[serve]'" in said
