"""Artifacts appear in a repository whole, with their manifest, or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from cosytriton_ensemble.manifest import SUFFIX


@contextlib.contextmanager
def staging(repository: Path, models: Collection[str]) -> Iterator[dict[str, Path]]:
    """Give a folder per model, inside the model's own: one file system, and Triton ignores its name."""
    with contextlib.ExitStack() as stack:
        drafts = {}
        for name in models:
            parent = repository / name
            created = not parent.exists()
            parent.mkdir(parents=True, exist_ok=True)
            if created:
                stack.callback(_remove_if_empty, parent)
            drafts[name] = Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=".draft-"))
            )
        yield drafts


def publish(draft: Path, place: Path, stale: Collection[str] = ()) -> None:
    """Move the files of a draft; manifests go last, so that a mixture never passes for whole.

    `stale` are names of files that what is replaced may have had: they are removed unless they were written.
    """
    place.mkdir(parents=True, exist_ok=True)
    files = sorted(
        draft.iterdir(), key=lambda file: (file.name.endswith(SUFFIX), not file.name.endswith(".data"))
    )
    for name in set(stale) - {file.name for file in files}:
        (place / name).unlink(missing_ok=True)
    for file in files:
        file.replace(place / file.name)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
