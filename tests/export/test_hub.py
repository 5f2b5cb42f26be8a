"""Checkpoints by hub name, with the hubs' clients replaced: this needs no network."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from cosytriton_export.errors import CheckpointError
from cosytriton_export.hub import FILES, resolve

NAME = "FunAudioLLM/CosyVoice2-0.5B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

Download = Callable[..., str]


class FakeHub:
    """A client that lays out a snapshot as Hugging Face's does: links to contents named by their digest."""

    def __init__(self, root: Path, config: str = "cosyvoice2.yaml") -> None:
        self.root, self.config = root, config
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        blobs, snapshot = self.root / "blobs", self.root / "snapshots" / COMMIT
        for file, content, digest in (
            (self.config, b"a: 1", hashlib.sha1(b"blob 4\0a: 1").hexdigest()),
            ("CosyVoice-BlankEN/vocab.json", b"{}", hashlib.sha1(b"blob 2\0{}").hexdigest()),
            ("llm.pt", b"weights", hashlib.sha256(b"weights").hexdigest()),
        ):
            for path in (blobs / digest, snapshot / file):
                path.parent.mkdir(parents=True, exist_ok=True)
            (blobs / digest).write_bytes(content)
            (snapshot / file).symlink_to(blobs / digest)
        return str(snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_an_existing_directory_is_taken_as_it_is(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert resolve(NAME) == Path(NAME)
    assert resolve(tmp_path) == tmp_path
    assert not hub.calls
    with pytest.raises(CheckpointError, match="a revision belongs to a name on a hub"):
        resolve(NAME, revision=COMMIT)


def test_a_name_is_fetched_with_what_an_export_reads(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        path = resolve(NAME, cache=tmp_path / "cache")
    assert (path / "llm.pt").read_bytes() == b"weights"
    ((name, options),) = hub.calls
    assert name == NAME
    assert options["revision"] == "main"
    assert options["cache_dir"] == tmp_path / "cache"
    assert set(FILES) <= set(options["allow_patterns"])
    assert COMMIT in caplog.text  # what a moving branch was resolved to


def test_the_files_of_all_families_are_fetched_and_no_others() -> None:
    assert {"cosyvoice.yaml", "cosyvoice2.yaml", "cosyvoice3.yaml", "spk2info.pt"} <= set(FILES)
    assert {f"speech_tokenizer_v{number}.onnx" for number in (1, 2, 3)} <= set(FILES)
    assert "CosyVoice-BlankEN/vocab.json" in FILES
    assert "CosyVoice-BlankEN/model.safetensors" not in FILES  # a gigabyte that nothing reads
    assert len(set(FILES)) == len(FILES)


def test_a_revision_is_passed_on(hub: FakeHub) -> None:
    resolve(NAME, revision=COMMIT)
    assert hub.calls[0][1]["revision"] == COMMIT


def test_modelscope_is_asked_by_its_prefix(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeHub(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=other.snapshot_download))
    assert resolve("modelscope:iic/CosyVoice2-0.5B").is_dir()
    assert other.calls[0][0] == "iic/CosyVoice2-0.5B"
    assert other.calls[0][1]["revision"] == "master"
    assert not hub.calls


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no\nroute"), OfflineModeIsEnabled("off")])
def test_an_offline_machine_hears_how_to_fetch_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="is no directory, and could not be fetched") as caught:
        resolve(NAME, revision=COMMIT)
    message = str(caught.value)
    assert type(error).__name__ in message
    assert f"hf download {NAME} --revision {COMMIT} --local-dir" in message
    assert all(file in message for file in FILES)


def test_the_real_client_s_errors_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client itself, offline and with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=f"{NAME}: is no directory.*NotFound"):
        resolve(NAME, cache=tmp_path)


def test_a_hub_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(
        CheckpointError, match=r"pip install 'cosytriton\[hub\]'.*`modelscope download --model a/b"
    ):
        resolve("modelscope:a/b")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nowhere", "other:a/b", "../a/b", "a/b/c", "-a/b c"])
def test_what_is_neither_a_directory_nor_a_name_is_refused(hub: FakeHub, name: str) -> None:
    with pytest.raises(CheckpointError, match="is no directory, and no name on a hub"):
        resolve(name)
    assert not hub.calls


@pytest.mark.parametrize("victim", ["llm.pt", "CosyVoice-BlankEN/vocab.json"])
def test_a_damaged_download_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    whole: Download = hub.snapshot_download

    def damaged(name: str, **options: Any) -> str:
        path = whole(name, **options)
        Path(path, victim).resolve().write_bytes(b"bad")
        return path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", damaged)
    with pytest.raises(CheckpointError, match=f"damaged downloads: {victim}"):
        resolve(NAME)


def test_a_repository_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path / "hub", config="config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    with pytest.raises(CheckpointError, match="is no CosyVoice checkpoint"):
        resolve("org/other")
