"""The built-in calibration material: half a minute of speech by five speakers, and forty sentences.

It is packed in one file; its NOTICE, inside, names the sources and their licences.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosytriton_engines.calibration.material import CalibrationError

ARCHIVE = Path(__file__).with_name("builtin_set.tar.xz")
ARCHIVE_SHA256 = "f9089739319913fc745ea20358188e1a14aea310e51b64203b6ada7769e01dc0"
_FOLDER = "builtin_set"  # the one folder in the archive


@contextmanager
def builtin_set(archive: Path = ARCHIVE) -> Iterator[tuple[Path, Path]]:
    """Unpack it for a while: the folder of recordings and the file of texts.

    Raises `CalibrationError` when the archive is missing or damaged, or there is no room to unpack it.
    """
    with tempfile.TemporaryDirectory(prefix="cosytriton-") as folder:
        try:
            _unpack(archive, Path(folder))
        except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise CalibrationError(
                f"The built-in calibration material cannot be unpacked to {folder}: {error}. Free some room, "
                "or install the package again."
            ) from error
        yield Path(folder, _FOLDER, "recordings"), Path(folder, _FOLDER, "texts.txt")


def _unpack(archive: Path, folder: Path) -> None:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise CalibrationError(
            f"{archive}: sha256 is {digest}, expected {ARCHIVE_SHA256}. Install the package again."
        )
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(folder, filter="data")
