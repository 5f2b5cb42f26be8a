"""The subcommands of this package: what they write, print and refuse."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cosytriton_ensemble.cli import Command
from cosytriton_ensemble.errors import InputError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.repository import check_repository, skeleton
from cosytriton_export import commands, demo, demo_voice
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.commands import DEMO, EXPORT, WRITE
from cosytriton_export.demo import Speaker
from cosytriton_export.errors import CheckpointError

CHEAP = ("text_frontend", "tts")  # models whose artifact is no graph


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would load torch again."""
    monkeypatch.setattr(commands, "WORKERS", 1)


def run(command: Command, *arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


def test_a_checkpoint_is_written_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = COSYVOICE1
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / "repository"
    assert run(WRITE, checkpoint, "--family", family.name, "--seed", "3") == 0
    assert f"{checkpoint}: an untrained checkpoint, its sound is noise" in capsys.readouterr().out
    assert Checkpoint.open(checkpoint).family is family
    assert run(EXPORT, checkpoint, "--repository", repository, "--stages", *CHEAP) == 0
    table = capsys.readouterr().out
    assert all(f"| {model} " in table for model in CHEAP)
    assert table.endswith("untrained: its sound is noise\n")
    files = {"text_frontend": "tokenizer.json", "tts": "speakers.safetensors"}
    assert all((repository / m / "1" / f"{files[m]}.manifest.json").is_file() for m in CHEAP)
    assert {name: (repository / name).read_text() for name in skeleton(family)} == skeleton(family)


def test_stages_of_another_checkpoint_make_a_repository_that_is_not_served(
    checkpoints: Callable[[Family], Checkpoint], tiny_repository: Path, tmp_path: Path
) -> None:
    repository = Path(shutil.copytree(tiny_repository, tmp_path / "repository"))
    run(EXPORT, checkpoints(COSYVOICE3).path, "--repository", repository, "--stages", *CHEAP)
    with pytest.raises(RepositoryError, match="mixes 2 checkpoints.*Export one of them again, whole"):
        check_repository(repository)


def test_cosyvoice_2_is_written_where_no_family_is_named(tmp_path: Path) -> None:
    assert run(WRITE, tmp_path / "checkpoint") == 0
    assert Checkpoint.open(tmp_path / "checkpoint").family is COSYVOICE2


def test_a_family_that_is_not_known_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(WRITE, tmp_path / "checkpoint", "--family", "cosyvoice9")
    assert "cosyvoice9" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()


def test_a_refused_export_writes_no_configurations(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no CosyVoice checkpoint"):
        run(EXPORT, tmp_path / "empty", "--repository", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


class TestDemo:
    """What the demonstration is asked for; the demonstration itself is `make demo`."""

    @pytest.fixture
    def asked(
        self, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> list[tuple[Checkpoint, Speaker]]:
        asked = []

        def run_demo(checkpoint: Checkpoint, speaker: Speaker, *_: object) -> str:
            asked.append((checkpoint, speaker))
            return "the table"

        monkeypatch.setattr(demo, "run_demo", run_demo)
        monkeypatch.setattr(demo_voice, "unpack_demo_voice", lambda _: demo_checkpoint.path)
        return asked

    def test_the_demo_voice_says_its_sentence(
        self, asked: list[tuple[Checkpoint, Speaker]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(DEMO) == 0
        ((checkpoint, speaker),) = asked
        assert not checkpoint.untrained
        assert speaker.text == "Good evening, please wait for your server."
        assert speaker.voice.is_file()
        assert speaker.transcript.strip()
        assert capsys.readouterr().out == "the table\n"

    def test_everything_can_be_replaced(
        self,
        asked: list[tuple[Checkpoint, Speaker]],
        checkpoints: Callable[[Family], Checkpoint],
    ) -> None:
        other = checkpoints(COSYVOICE3)
        flags = ("--text", "Hello.", "--voice", "me.wav", "--transcript", "What I said.")
        assert run(DEMO, "--checkpoint", other.path, *flags) == 0
        ((checkpoint, speaker),) = asked
        assert checkpoint.family is COSYVOICE3
        assert speaker == Speaker("Hello.", Path("me.wav"), "What I said.")

    @pytest.mark.parametrize("flag", ["--voice", "--transcript"])
    def test_a_voice_needs_its_transcript(self, asked: list[tuple[Checkpoint, Speaker]], flag: str) -> None:
        with pytest.raises(InputError, match="--voice and --transcript belong together"):
            run(DEMO, flag, "x")
        assert not asked
