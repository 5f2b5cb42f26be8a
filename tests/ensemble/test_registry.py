"""Enrolled voices: names, files, and what a request gets."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.registry import (
    VoiceFolder,
    check_name,
    enrolled,
    read_card,
    remove,
    speakers_file,
)
from cosytriton_ensemble.voice import Voice

CHECKPOINT = "cosyvoice2:" + "ab" * 32


def voice(seed: int = 0, transcript: str = "what is said") -> Voice:
    rng = np.random.default_rng(seed)
    return Voice(
        rng.normal(size=192).astype(np.float32),
        rng.integers(0, 6561, 20).astype(np.int32),
        rng.normal(size=(40, 80)).astype(np.float32),
        transcript,
    )


def same(one: Voice, other: Voice) -> bool:
    arrays = ((one.speaker, other.speaker), (one.tokens, other.tokens), (one.mel, other.mel))
    return one.transcript == other.transcript and all(np.array_equal(a, b) for a, b in arrays)


@pytest.fixture
def folder(tmp_path: Path) -> VoiceFolder:
    return VoiceFolder(tmp_path / "voices", CHECKPOINT)


@pytest.mark.parametrize("name", ["anna", "中文女", "Anna-2.b", "x" * 64, "é"])
def test_a_voice_comes_back_as_it_was_enrolled(folder: VoiceFolder, name: str) -> None:
    folder.add(name, voice(1))
    assert same(folder.get(name), voice(1))
    assert folder.names() == [check_name(name)]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "x" * 65, "x" * 300, "a\0b", "a\nb", ".hidden"],
)
def test_a_name_is_never_a_path(folder: VoiceFolder, tmp_path: Path, name: str) -> None:
    for use in (folder.get, lambda n: folder.add(n, voice()), lambda n: remove(tmp_path / "voices", n)):
        with pytest.raises(InputError, match="cannot be the name of a voice"):
            use(name)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_another_case_of_a_name_is_refused(folder: VoiceFolder) -> None:
    folder.add("Anna", voice())
    with pytest.raises(InputError, match="'anna' is taken by the voice 'Anna'"):
        folder.add("anna", voice())
    with pytest.raises(InputError, match="no voice 'anna'. Present are: Anna"):
        folder.get("anna")


def test_a_name_is_overwritten_only_when_asked(folder: VoiceFolder) -> None:
    folder.add("anna", voice(1))
    with pytest.raises(InputError, match="taken by the voice 'anna'; give --replace"):
        folder.add("anna", voice(2))
    assert same(folder.get("anna"), voice(1))
    folder.add("anna", voice(2), replace=True)
    assert same(folder.get("anna"), voice(2))


def test_a_voice_of_another_checkpoint_is_refused(folder: VoiceFolder, tmp_path: Path) -> None:
    folder.add("anna", voice())
    other = VoiceFolder(tmp_path / "voices", "cosyvoice2:" + "cd" * 32)
    with pytest.raises(InputError, match="'anna' was enrolled with another checkpoint.*Enrol it again"):
        other.get("anna")


def test_a_removed_voice_is_gone_at_once(folder: VoiceFolder, tmp_path: Path) -> None:
    folder.add("anna", voice())
    remove(tmp_path / "voices", "anna")
    with pytest.raises(InputError, match="no voice 'anna'. Present are: none"):
        folder.get("anna")
    with pytest.raises(InputError, match="no voice 'anna'"):
        remove(tmp_path / "voices", "anna")


def test_a_card_tells_what_a_voice_is(folder: VoiceFolder, tmp_path: Path) -> None:
    folder.add("anna", voice(transcript="Guten Tag."))
    card = read_card(tmp_path / "voices", "anna")
    assert (card.name, card.checkpoint, card.transcript, card.tokens) == (
        "anna",
        CHECKPOINT,
        "Guten Tag.",
        20,
    )
    assert enrolled(tmp_path / "voices") == ["anna"]


@pytest.mark.parametrize("damage", [b"", b"not safetensors", None])
def test_a_damaged_file_is_refused_by_name(folder: VoiceFolder, damage: bytes | None) -> None:
    path = folder.add("anna", voice())
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(InputError, match="file of the voice 'anna' is damaged"):
        folder.get("anna")


def test_a_voice_that_no_encoder_gives_is_not_enrolled(folder: VoiceFolder, tmp_path: Path) -> None:
    bad = voice()
    bad.speaker[3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        folder.add("anna", bad)
    assert not list(tmp_path.rglob("*"))


def test_the_checkpoints_own_speakers_are_voices_too(tmp_path: Path) -> None:
    own = tmp_path / "speakers.safetensors"
    bare = Voice(np.ones(192, np.float32))
    own.write_bytes(speakers_file({"中文女": bare, "whole": voice(3)}))
    folder = VoiceFolder(tmp_path / "voices", CHECKPOINT, own)
    assert not folder.get("中文女").has_reference
    assert same(folder.get("whole"), voice(3))
    assert folder.names() == ["whole", "中文女"]
    with pytest.raises(InputError, match="Present are: whole, 中文女"):
        folder.get("女")
    with pytest.raises(InputError, match="taken by the voice 'whole'"):
        folder.add("Whole", voice())


def test_readers_see_one_voice_or_the_other_while_it_is_replaced(folder: VoiceFolder) -> None:
    folder.add("anna", voice(0))
    stop, mixed = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen = folder.get("anna")
            if not (same(seen, voice(0)) or same(seen, voice(1))):
                mixed.append(seen)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(100):
        folder.add("anna", voice(number % 2), replace=True)
    stop.set()
    for reader in readers:
        reader.join()
    assert not mixed
