"""Checkpoints by their name on a model hub.

"org/name" is fetched from Hugging Face, "modelscope:org/name" from ModelScope: only the files that an export
reads, resumed where a download was interrupted. The clients of the hubs are the extra `hub`, loaded when a
hub is asked.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_ensemble.families import FAMILIES
from cosytriton_export.errors import CheckpointError
from cosytriton_export.layout import LAYOUTS, SPEAKERS, UNTRAINED
from cosytriton_export.weights import name_some

log = logging.getLogger(__name__)

_REQUIRED = dict.fromkeys(
    name for family in FAMILIES.values() for name in (family.config_file, *LAYOUTS[family.name].files)
)
FILES = (*_REQUIRED, SPEAKERS)
"""What is fetched of a repository, whatever its family."""

_ID = re.compile(r"(?:(?P<hub>[a-z]+):)?(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class _Hub:
    title: str
    module: str  # has snapshot_download(id, revision=, cache_dir=, allow_patterns=)
    branch: str
    command: str


_HUBS = {
    "hf": _Hub(
        "Hugging Face",
        "huggingface_hub",
        "main",
        "hf download {id} --revision {revision} --local-dir DIRECTORY",
    ),
    "modelscope": _Hub(
        "ModelScope",
        "modelscope",
        "master",
        "modelscope download --model {id} --revision {revision} --local_dir DIRECTORY",
    ),
}


def resolve(name_or_path: str | Path, revision: str | None = None, cache: Path | None = None) -> Path:
    """Return the directory of a checkpoint, which is fetched if it is named by a hub id.

    Args:
        name_or_path: a directory, "org/name" or "modelscope:org/name"; an existing directory goes first.
        revision: commit, tag or branch on the hub. A commit gives the same files for ever; without one the
            main branch is fetched, and the log says which commit that is.
        cache: folder of the downloads; if not given, the one that the hub's own client uses.

    Raises:
        CheckpointError: there is neither such a directory nor such a repository, or it cannot be fetched; the
            message says how to fetch it by hand. A fetched file is damaged.

    """
    path = Path(name_or_path)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{path} is a directory: a revision belongs to a name on a hub.")
        return path
    found = _ID.fullmatch(str(name_or_path))
    hub = _HUBS.get(found["hub"] or "hf") if found else None
    if not found or not hub:
        raise CheckpointError(
            f"{name_or_path}: is no directory, and no name on a hub, which is org/name (Hugging Face) or "
            "modelscope:org/name."
        )
    return _fetch(hub, found["id"], revision or hub.branch, cache)


def _fetch(hub: _Hub, name: str, revision: str, cache: Path | None) -> Path:
    download = _client(hub, name, revision).snapshot_download
    try:
        path = Path(download(name, revision=revision, cache_dir=cache, allow_patterns=[*FILES, UNTRAINED]))
    except Exception as error:  # each client has its own, and those of its network library
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{name}: is no directory, and could not be fetched from {hub.title}, revision {revision} "
            f"({type(error).__name__}: {reason[0][:200]}). {_by_hand(hub, name, revision)}"
        ) from error
    damaged = [str(file.relative_to(path)) for file in _damaged(path)]
    if damaged:
        raise CheckpointError(f"{path}: damaged downloads: {name_some(damaged)}. Delete them and try again.")
    if not any((path / family.config_file).is_file() for family in FAMILIES.values()):
        raise CheckpointError(f"{name}, revision {revision}, on {hub.title}: is no CosyVoice checkpoint.")
    # The folder of a snapshot from Hugging Face is named after its commit.
    log.info("%s, revision %s, from %s: %s", name, revision, hub.title, path)
    return path


def _client(hub: _Hub, name: str, revision: str) -> Any:
    try:
        return importlib.import_module(hub.module)
    except ImportError as error:
        raise CheckpointError(
            f"{hub.module} is not installed, which fetches from {hub.title}: pip install 'cosytriton[hub]'. "
            + _by_hand(hub, name, revision)
        ) from error


def _by_hand(hub: _Hub, name: str, revision: str) -> str:
    """Say how to get the files without this machine's connection."""
    command = hub.command.format(id=name, revision=revision)
    return (
        f"Elsewhere, `{command}` fetches it; copy the directory here and give it in the place of the name. "
        f"Of these files it needs those of its family: {', '.join(FILES)}."
    )


def _damaged(folder: Path) -> Iterator[Path]:
    """Compare files with their digests, which are the names that Hugging Face's cache gives to contents."""
    for file in sorted(folder.rglob("*")):
        digest = file.resolve().name
        if file.is_symlink() and _DIGEST.fullmatch(digest) and digest != _digest(file, len(digest)):
            yield file


def _digest(file: Path, length: int) -> str:
    """SHA-256 of a large file; a small one has its id in git, a SHA-1 behind a header."""
    with file.open("rb") as content:
        if length == 64:
            return hashlib.file_digest(content, "sha256").hexdigest()
        data = content.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
