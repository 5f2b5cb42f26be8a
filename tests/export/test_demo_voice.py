"""The packed demo voice: unpacked once, checked, whole, and small enough to ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.demo_voice import ARCHIVE, unpack_demo_voice
from cosytriton_export.errors import CheckpointError

MAX_BYTES = 25_000_000


def test_the_archive_is_small() -> None:
    assert ARCHIVE.stat().st_size <= MAX_BYTES


def test_it_is_a_checkpoint_with_prompts_and_its_notices(demo_checkpoint: Checkpoint) -> None:
    path = demo_checkpoint.path
    recordings = sorted(file.stem for file in (path / "prompts").glob("*.wav"))
    assert recordings == ["rms_2", "slt_1", "slt_3"]
    assert all((path / "prompts" / f"{name}.txt").read_text().strip() for name in recordings)
    assert "Carnegie Mellon University" in (path / "FLITE_COPYRIGHT").read_text()
    assert "unmodified, with one exception" in (path / "NOTICE").read_text()


def test_it_is_unpacked_once(tmp_path: Path) -> None:
    first = unpack_demo_voice(tmp_path)
    (first / "mark").touch()
    assert unpack_demo_voice(tmp_path) == first
    assert (first / "mark").exists()
    assert [file.name for file in tmp_path.iterdir()] == [first.name]  # no leftovers


def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(ARCHIVE.read_bytes()[:-1000])
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"sha256 is .*, expected .*Install the package again"):
        unpack_demo_voice(cache, damaged)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"the demo voice cannot be unpacked to .*file"):
        unpack_demo_voice(tmp_path / "file")
