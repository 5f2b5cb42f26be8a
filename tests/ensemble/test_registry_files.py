"""What may lie in the folder of voices instead of a voice: a clear refusal, whatever it is."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.registry import FORMAT, MAX_BYTES, VoiceFolder, enrolled, read_card, remove
from cosytriton_ensemble.voice import Voice

CHECKPOINT = "cosyvoice2:" + "ab" * 32
FACTS = {"format": FORMAT, "checkpoint": CHECKPOINT, "transcript": "said", "created": "2025-01-01T00:00:00Z"}
GOOD = {
    "speaker_embedding": np.ones(192, np.float32),
    "prompt_tokens": np.arange(20, dtype=np.int32),
    "prompt_mel": np.ones((40, 80), np.float32),
}
NOBODY = 65534

Array = np.ndarray[Any, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file of the voice "anna" is looked for."""
    (tmp_path / "voices").mkdir()
    return tmp_path / "voices" / "anna.safetensors"


@pytest.fixture
def folder(path: Path) -> VoiceFolder:
    return VoiceFolder(path.parent, CHECKPOINT)


def raw(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file that claims what it likes."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_the_good_file_is_a_voice(path: Path, folder: VoiceFolder) -> None:
    path.write_bytes(save(GOOD, FACTS))
    assert folder.get("anna").transcript == "said"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": np.arange(20)}, r"its prompt_tokens is int64 \[20\]"),
        ({"prompt_tokens": np.arange(20, dtype=np.float32)}, r"its prompt_tokens is float32 \[20\]"),
        ({"prompt_tokens": np.zeros((2, 10), np.int32)}, r"its prompt_tokens is int32 \[2, 10\]"),
        ({"prompt_mel": np.ones((40, 80))}, r"its prompt_mel is float64 \[40, 80\]"),
        ({"prompt_mel": np.ones((1, 40, 80), np.float32)}, r"its prompt_mel is float32 \[1, 40, 80\]"),
        ({"prompt_mel": np.ones((0, 80), np.float32)}, "20 tokens and 0 frames"),
        ({"prompt_tokens": np.zeros(0, np.int32)}, "0 tokens and 40 frames"),
        ({"speaker_embedding": np.array(1, np.float32)}, r"its speaker_embedding is float32 \[\]"),
        ({"more": np.zeros(MAX_BYTES, np.int8)}, f"at most {MAX_BYTES} are allowed"),
    ],
)
def test_other_types_and_shapes(
    path: Path, folder: VoiceFolder, changed: dict[str, Array], message: str
) -> None:
    path.write_bytes(save({**GOOD, **changed}, FACTS))
    with pytest.raises(InputError, match=f"file of the voice 'anna' is damaged.*{message}.*enrol it again"):
        folder.get("anna")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": np.full(20, 6561, np.int32)}, "prompt_tokens holds the ids 6561"),
        ({"prompt_tokens": np.full(20, -1, np.int32)}, "prompt_tokens holds the ids -1"),
        ({"prompt_tokens": np.zeros(5_000, np.int32)}, "5000 tokens"),
        ({"prompt_mel": np.full((40, 80), np.nan, np.float32)}, "prompt_mel holds NaN"),
        ({"prompt_mel": np.ones((40, 64), np.float32)}, "shape that CosyVoice2"),
        ({"speaker_embedding": np.ones(64, np.float32)}, "shape that CosyVoice2"),
        ({"speaker_embedding": np.zeros(192, np.float32)}, "speaker_embedding is all zeros"),
    ],
)
def test_what_no_encoder_gives_is_not_spoken(
    path: Path, folder: VoiceFolder, changed: dict[str, Array], message: str
) -> None:
    """The file is a voice's; what it holds is checked as what a request brings."""
    from cosytriton_ensemble.families import COSYVOICE2

    path.write_bytes(save(GOOD | changed, FACTS))
    with pytest.raises(InputError, match=message):
        folder.get("anna").checked(COSYVOICE2)


def claims(dtype: str, shape: list[int], begin: int = 0, end: int = 0, size: int = 768) -> bytes:
    """A file with `size` bytes of data and one tensor that claims to lie in them."""
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return raw({"__metadata__": FACTS, "speaker_embedding": tensor}, bytes(size))


HOSTILE: dict[str, bytes | Callable[[], bytes]] = {
    "a header longer than the file": struct.pack("<Q", 2**40) + b"{}",
    "a header of 2**64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "nested JSON": lambda: struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
    "data outside the file": claims("F32", [192], 0, 2**50),
    "data before the file": claims("F32", [192], 768, 0),
    "more elements than data": claims("F32", [2**40], 0, 768),
    "a product that wraps": claims("F32", [2**33, 2**33], 0, 768),
    "an empty axis beside a huge one": claims("F32", [0, 2**63], size=0),
    "forty axes": claims("I8", [1] * 39 + [768], 0, 768),
    "an unknown type": claims("F13", [192], 0, 768),
    "a type that numpy lacks": claims("BF16", [384], 0, 768),
    "no tensors": raw({"__metadata__": FACTS}),
    "no facts": save(GOOD),
    "half the facts": save(GOOD, {"format": FORMAT}),
    "another format": save(GOOD, FACTS | {"format": "cosytriton.voice.9"}),
    "facts that are no text": raw({"__metadata__": {"format": 1}}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(path: Path, folder: VoiceFolder, kind: str) -> None:
    content = HOSTILE[kind]
    path.write_bytes(content if isinstance(content, bytes) else content())
    for use in (folder.get, lambda name: read_card(path.parent, name)):
        with pytest.raises(InputError, match="file of the voice 'anna' is damaged"):
            use("anna")


def lay_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def lay_link(path: Path) -> None:
    """To a good voice outside the folder."""
    target = path.parents[1] / "secret.safetensors"
    target.write_bytes(save(GOOD, FACTS))
    path.symlink_to(target)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "cannot be read .Is a directory"),
    "pipe": (os.mkfifo, "is damaged .it is no regular file"),
    "socket": (lay_socket, "cannot be read .No such device"),
    "link": (lay_link, "cannot be read .it is a link"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "cannot be read .it is a link"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_refused(
    path: Path, folder: VoiceFolder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay, message = STRANGE[kind]
    monkeypatch.chdir(path.parent)  # the path of a socket may be 108 characters long
    lay(Path(path.name) if kind == "socket" else path)
    with pytest.raises(InputError, match=f"file of the voice 'anna' {message}"):
        folder.get("anna")
    assert enrolled(path.parent) == ["anna"]
    if kind == "directory":
        with pytest.raises(InputError, match="'anna' cannot be removed"):
            remove(path.parent, "anna")
    else:
        remove(path.parent, "anna")
        assert enrolled(path.parent) == []


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions mean nothing to root."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_file_that_may_not_be_read(path: Path, folder: VoiceFolder) -> None:
    path.write_bytes(save(GOOD, FACTS))
    path.chmod(0)
    with (
        unprivileged(),
        pytest.raises(InputError, match="'anna' cannot be read .Permission denied") as caught,
    ):
        folder.get("anna")
    assert str(path.parent) not in str(caught.value)  # a client need not know where the server's files lie


def test_a_folder_that_may_not_be_changed(path: Path, folder: VoiceFolder) -> None:
    path.parent.chmod(0o555)
    bare = Voice(np.ones(192, np.float32))
    with unprivileged(), pytest.raises(InputError, match="Permission denied"):
        folder.add("bert", bare)
    path.parent.rmdir()
    path.parent.write_text("a file in the place of the folder")
    with pytest.raises(InputError, match="cannot be listed .Not a directory"):
        folder.add("bert", bare)


def test_a_file_that_is_cut_short_while_it_is_read_kills_nobody(path: Path, folder: VoiceFolder) -> None:
    """Voices that were taken do not lean on the file any more."""
    path.write_bytes(save(GOOD, FACTS))
    voice = folder.get("anna")
    os.truncate(path, 10)
    held = (voice.speaker, voice.tokens, voice.mel)
    assert all(np.array_equal(a, b) for a, b in zip(held, GOOD.values(), strict=True))
    with pytest.raises(InputError, match="damaged"):
        folder.get("anna")


def test_any_layout_in_memory_is_enrolled_alike(folder: VoiceFolder) -> None:
    mel = np.random.default_rng(0).normal(size=(40, 80))
    folder.add("anna", Voice(np.arange(192) + 1.0, np.arange(40)[::2], np.asfortranarray(mel), "said"))
    voice = folder.get("anna")
    assert np.array_equal(voice.speaker, np.arange(192, dtype=np.float32) + 1)
    assert np.array_equal(voice.tokens, np.arange(0, 40, 2, dtype=np.int32))
    assert np.array_equal(voice.mel, mel.astype(np.float32))


def test_a_transcript_that_is_no_unicode(folder: VoiceFolder) -> None:
    with pytest.raises(InputError, match="transcript is not valid Unicode"):
        folder.add("anna", Voice(np.ones(192, np.float32), transcript="\udcff"))
