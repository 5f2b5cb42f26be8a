"""Enrolled voices: one safetensors file for each name, in a folder that the server reads at every request.

Nothing is cached: reading half a megabyte takes less than a millisecond, so a voice that is added, replaced
or removed counts at once, memory stays what it is, and no key can hand out another one's voice.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import family_named
from cosytriton_ensemble.spec import Array
from cosytriton_ensemble.voice import Voice

SUFFIX = ".safetensors"
MAX_NAME = 64  # characters
FORMAT = "cosytriton.voice.1"
MAX_BYTES = 4 << 20  # of a file; the longest reference of any family takes a fourth of it
# The tensors of a voice: type and number of axes.
_TENSORS = {
    "speaker_embedding": (np.float32, 1),
    "prompt_tokens": (np.int32, 1),
    "prompt_mel": (np.float32, 2),
}


def check_name(name: str) -> str:
    """Return the name in Unicode's composed form; InputError unless it is a name and never a path."""
    name = unicodedata.normalize("NFC", name)
    bad = not name.isprintable() or any(sign in name for sign in '/\\:*?"<>|') or name[:1] in (".", " ", "")
    if bad or len(name) > MAX_NAME or name.endswith((" ", ".")) or len(name.encode()) > 240:
        raise InputError(
            f"{name[:MAX_NAME]!r} cannot be the name of a voice: a name has 1 to {MAX_NAME} printable "
            'characters, does not begin with a dot or a blank, and holds none of / \\ : * ? " < > |.'
        )
    return name


@dataclass(frozen=True, slots=True)
class Card:
    """What a voice's file says about it."""

    name: str
    checkpoint: str  # `family:hash` of the checkpoint that it was encoded with
    transcript: str
    tokens: int
    created: str  # UTC, ISO 8601


class VoiceFolder:
    """The voices of one checkpoint.

    Args:
        folder: where enrolled voices lie; need not exist.
        checkpoint: its identity as `checkpoint_of` gives it; a voice of another one is refused.
        speakers: the checkpoint's own voices, a file that the export wrote, if any.
    """

    def __init__(self, folder: Path, checkpoint: str, speakers: Path | None = None) -> None:
        self._folder, self._checkpoint, self._speakers = folder, checkpoint, speakers
        self._family = family_named(checkpoint.partition(":")[0])

    def get(self, name: str) -> Voice:
        """The voice; InputError when there is none of this name, or it belongs to another checkpoint."""
        name = check_name(name)
        path = _path(self._folder, name)
        try:
            voice, card = _read(path, name)
        except FileNotFoundError:
            return self._speaker(name)
        if card.checkpoint != self._checkpoint:
            raise InputError(
                f"The voice {name!r} was enrolled with another checkpoint ({card.checkpoint[:24]}…, this "
                f"server has {self._checkpoint[:24]}…): its tokens mean other sounds here. Enrol it again."
            )
        return voice

    def names(self) -> list[str]:
        """Every name that a request may use."""
        return sorted({*enrolled(self._folder), *self._speaker_names()})

    def add(self, name: str, voice: Voice, *, replace: bool = False) -> Path:
        """Enrol a voice; its file appears complete or not at all.

        InputError when the name is taken (in any case of its letters) and `replace` is False, or is none.
        """
        name = check_name(name)
        twin = next((n for n in self.names() if n.casefold() == name.casefold()), None)
        if twin is not None and not (replace and twin == name):
            hint = "give --replace to overwrite it" if twin == name else "choose another one"
            raise InputError(f"The name {name!r} is taken by the voice {twin!r}; {hint}.")
        voice = voice.checked(self._family)
        facts = {
            "format": FORMAT,
            "checkpoint": self._checkpoint,
            "transcript": voice.transcript,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            data = save(_arrays(voice), facts)
        except UnicodeEncodeError as error:
            raise InputError(f"The transcript is not valid Unicode ({error.reason}).") from error
        return _write(_path(self._folder, name), data, replace)

    def _speaker(self, name: str) -> Voice:
        if self._speakers is not None and name in self._speaker_names():
            with safe_open(self._speakers, "np") as file:
                speaker, tokens, mel = (np.array(file.get_tensor(f"{name}/{tensor}")) for tensor in _TENSORS)
                transcript = (file.metadata() or {}).get(f"{name}/transcript", "")
            return Voice(speaker, tokens, mel, transcript)
        known = self.names()
        listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
        raise InputError(
            f"There is no voice {name!r}. Present are: {listed or 'none'}. Enrol one with "
            "`cosytriton voices add`, or send reference audio."
        )

    def _speaker_names(self) -> list[str]:
        if self._speakers is None or not self._speakers.is_file():
            return []
        with safe_open(self._speakers, "np") as file:
            return sorted({key.rsplit("/", 1)[0] for key in file.keys()})  # noqa: SIM118  (no mapping)


def speakers_file(voices: Mapping[str, Voice]) -> bytes:
    """The content of the file that holds a checkpoint's own voices."""
    tensors: dict[str, Array] = {}
    for name, voice in voices.items():
        tensors |= {f"{name}/{tensor}": array for tensor, array in _arrays(voice).items()}
    transcripts = {f"{name}/transcript": voice.transcript for name, voice in voices.items()}
    return save(tensors, {"format": FORMAT} | transcripts)  # without any entry it would write no valid file


def enrolled(folder: Path) -> list[str]:
    """The names of the voices in a folder; none if it is not there, InputError if it cannot be read."""
    try:
        files = [os.fsencode(path.name).decode("utf-8", "replace") for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"The folder of voices cannot be listed ({error.strerror}).") from error
    return sorted(f.removesuffix(SUFFIX) for f in files if f.endswith(SUFFIX) and not f.startswith("."))


def read_card(folder: Path, name: str) -> Card:
    """What a voice's file says; InputError when there is none."""
    name = check_name(name)
    try:
        return _read(_path(folder, name), name)[1]
    except FileNotFoundError:
        raise InputError(f"There is no voice {name!r} in {folder}; {_listed(folder)}.") from None


def remove(folder: Path, name: str) -> None:
    """Delete a voice; InputError when there is none. Requests that already speak are not disturbed."""
    name = check_name(name)
    try:
        (_path(folder, name)).unlink()
    except FileNotFoundError:
        raise InputError(f"There is no voice {name!r} in {folder}; {_listed(folder)}.") from None
    except OSError as error:
        raise InputError(f"The voice {name!r} cannot be removed ({error.strerror}).") from error


def _path(folder: Path, name: str) -> Path:
    """The file of a voice; its name is UTF-8, also under Triton's Python stub, which knows ASCII alone."""
    return folder / os.fsdecode(f"{name}{SUFFIX}".encode())


def _listed(folder: Path) -> str:
    return f"it holds {', '.join(enrolled(folder)[:20]) or 'no voice'}"


def _arrays(voice: Voice) -> dict[str, Array]:
    """The tensors of a voice as a file holds them."""
    given = zip(_TENSORS.items(), (voice.speaker, voice.tokens, voice.mel), strict=True)
    return {tensor: np.ascontiguousarray(array, dtype) for (tensor, (dtype, _)), array in given}


def _read(path: Path, name: str) -> tuple[Voice, Card]:
    """Read a file; FileNotFoundError when it is not there, InputError when it is no voice."""
    try:
        raw = _content(path)
        arrays = load(raw)
        facts = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})
        if facts.get("format") != FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}")
        for tensor, (dtype, axes) in _TENSORS.items():
            if arrays[tensor].dtype != dtype or arrays[tensor].ndim != axes:
                raise ValueError(f"its {tensor} is {arrays[tensor].dtype} {list(arrays[tensor].shape)}")
        speaker, tokens, mel = (arrays[tensor] for tensor in _TENSORS)
        voice = Voice(speaker, tokens, mel, facts["transcript"])
        if voice.has_reference != (len(voice.mel) > 0):
            raise ValueError(f"it has {len(tokens)} tokens and {len(mel)} frames of mel")
        return voice, Card(name, facts["checkpoint"], voice.transcript, len(tokens), facts["created"])
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise InputError(f"The file of the voice {name!r} cannot be read ({reason}).") from error
    except (SafetensorError, KeyError, ValueError) as error:
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise InputError(f"The file of the voice {name!r} is damaged ({reason}); enrol it again.") from error


def _content(path: Path) -> bytes:
    """The bytes of a regular file. Not mapped: memory of a file that is cut short kills who looks at it."""
    # A link could show any file of the server; who opens a pipe would wait until somebody writes.
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, at most {MAX_BYTES} are allowed")
        return file.read(MAX_BYTES)


def _write(path: Path, data: bytes, replace: bool) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".voice-") as folder:
            draft = Path(folder, path.name)
            draft.write_bytes(data)
            draft.chmod(0o644)
            if replace:
                draft.replace(path)
            else:
                os.link(draft, path)  # unlike a rename, fails when somebody else has taken the name meanwhile
    except OSError as error:
        taken = isinstance(error, FileExistsError) and path.parent.is_dir()
        reason = "the name is taken; give --replace to overwrite it" if taken else error.strerror
        raise InputError(f"{path} cannot be written: {reason}.") from error
    return path
