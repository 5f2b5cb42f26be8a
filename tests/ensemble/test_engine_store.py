"""Engines lie under a key that changes with whatever they depend on, and no other key is served."""

from __future__ import annotations

import argparse
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from cosytriton_engines import commands as build_commands
from cosytriton_ensemble import commands
from cosytriton_ensemble.engine_store import begin_repository, check_key, engine_key, engine_repository
from cosytriton_ensemble.errors import InputError, RepositoryError, ServerError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import Manifest
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.repository import artifacts, version_directory, write_repository

L4 = Machine("NVIDIA L4 8.9", "10.16.1.11")
KEY = "nvidia-l4-8.9_trt-10.16.1.11_cosyvoice2-"


def export(repository: Path, checkpoint: str = "ab12") -> Path:
    """What an export of a checkpoint leaves, without weights."""
    write_repository(repository)
    for model, name in artifacts(pipeline_of(COSYVOICE2)).items():
        folder = version_directory(repository, model)
        Manifest(model, name, {}, checkpoint, "cosyvoice2", False, "fp32", {"torch": "2.13.0"}).write(folder)
    return repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return export(tmp_path / "model_repository")


def test_the_key_names_the_gpu_the_tensorrt_and_the_export(repository: Path) -> None:
    key = engine_key(repository, L4)
    assert key.startswith(KEY)
    assert key == engine_key(export(repository), L4)
    assert "/" not in key


@pytest.mark.parametrize(
    "machine",
    [
        Machine("NVIDIA L40S 8.9", L4.tensorrt),
        Machine("NVIDIA L4 8.9", "10.15.1.29"),
        Machine("NVIDIA L4 9.0", L4.tensorrt),
    ],
)
def test_another_machine_has_another_key(repository: Path, machine: Machine) -> None:
    assert engine_key(repository, machine) != engine_key(repository, L4)


def test_another_checkpoint_or_exporter_has_another_key(repository: Path, tmp_path: Path) -> None:
    key = engine_key(repository, L4)
    assert engine_key(export(tmp_path / "other", "cd34"), L4) != key
    (repository / "flow" / "config.pbtxt").write_text("of another version")
    assert engine_key(repository, L4) != key


@pytest.mark.parametrize(
    ("machine", "lacks"), [(Machine(None, "10.16.1.11"), "GPU"), (Machine("NVIDIA L4 8.9", None), "TensorRT")]
)
def test_a_machine_without_engines_has_no_key(repository: Path, machine: Machine, lacks: str) -> None:
    with pytest.raises(ServerError, match=f"no {lacks}"):
        engine_key(repository, machine)


def test_another_key_than_the_pinned_one_is_refused(repository: Path) -> None:
    key = engine_key(repository, L4)
    check_key(key, None)
    check_key(key, key)
    with pytest.raises(ServerError, match=f"{key}, not nvidia-h200"):
        check_key(key, "nvidia-h200-9.0_trt-10.16.1.11_cosyvoice2-abc")


def test_a_build_begins_in_a_copy_that_appears_whole(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, key = tmp_path / "engines", engine_key(repository, L4)
    with pytest.raises(RepositoryError, match=f"no engines for {key}; it has none"):
        engine_repository(engines, key)
    whole = shutil.copytree

    def killed(_source: Path, target: Path) -> None:
        (target / "flow").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", killed)
    with pytest.raises(KeyboardInterrupt):
        begin_repository(repository, engines, key)
    with pytest.raises(RepositoryError):
        engine_repository(engines, key)
    monkeypatch.setattr(shutil, "copytree", whole)
    copy = begin_repository(repository, engines, key)
    assert engine_repository(engines, key) == copy
    assert engine_key(copy, L4) == key
    (copy / "flow" / "1" / "model.fp16.plan").touch()
    assert begin_repository(repository, engines, key) == copy
    assert (copy / "flow" / "1" / "model.fp16.plan").exists()


def run(command: object, words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    command.arguments(parser)  # type: ignore[attr-defined]
    return int(command.run(parser.parse_args(words)))  # type: ignore[attr-defined]


@pytest.fixture
def on_an_l4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: L4)


@pytest.mark.usefixtures("on_an_l4")
def test_the_key_is_printed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_commands.BUILD, ["--key", f"--repository={repository}"]) == 0
    assert capsys.readouterr().out == f"{engine_key(repository)}\n"


@pytest.mark.usefixtures("on_an_l4")
def test_waiting_ends_when_the_engines_are_there(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines, built = tmp_path / "engines", threading.Event()

    def complete(*_: object) -> None:
        if not built.is_set():
            raise RepositoryError("lacks a plan")

    monkeypatch.setattr("cosytriton_ensemble.repository.check_repository", complete)
    monkeypatch.setattr(build_commands, "WAIT_SECONDS", 0.01)
    words = ["--profile=gpu_fp16", f"--repository={repository}", f"--engines={engines}", "--wait"]
    waiting = threading.Thread(target=run, args=(build_commands.BUILD, words))
    with caplog.at_level(logging.INFO):
        waiting.start()
        time.sleep(0.05)
        begin_repository(repository, engines, engine_key(repository))
        time.sleep(0.05)
        assert waiting.is_alive()
        built.set()
        waiting.join(5)
    assert not waiting.is_alive()
    told = [record.message for record in caplog.records]
    assert ["no engines for" in told[0], "lacks a plan" in told[1]] == [True, True]
    assert len(told) == 2


def test_waiting_without_a_place_is_refused(repository: Path) -> None:
    with pytest.raises(InputError, match="--wait needs --engines"):
        run(build_commands.BUILD, ["--profile=gpu_fp16", f"--repository={repository}", "--wait"])


@pytest.mark.usefixtures("on_an_l4")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines={engines}"], "no engines for"),
        (["--engines={engines}", "--engine-key=other"], "not other"),
        (["--engine-key=other"], "not other"),
    ],
)
def test_serve_refuses_what_was_not_built_for_it(
    repository: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    words = [word.format(engines=tmp_path / "engines") for word in words]
    with pytest.raises((RepositoryError, ServerError), match=message):
        run(commands.SERVE, [f"--repository={repository}", "--profile=gpu_fp16", *words])
