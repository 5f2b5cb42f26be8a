"""Memory in huge pages: which regions, and that the system does it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from cosytriton_ensemble.huge_pages import LEAST, PAGE, regions, settle

MIB = 1 << 20
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = """\
7f0000100000-7f0004100000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:               65536 kB
7f0010000000-7f0014000000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:                8192 kB
7f0020000000-7f0024000000 r--p 00000000 08:01 1234    /models/weights
Size:              65536 kB
Rss:               65536 kB
7f0030000000-7f0030800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                8192 kB
55d000000000-55d002000000 rw-p 00000000 00:00 0       [heap]
Size:              32768 kB
Rss:               20000 kB
"""


def test_regions_are_large_anonymous_and_mostly_in_use() -> None:
    """Neither a cache that is yet to be filled, nor a file, nor a stack."""
    assert list(regions(SMAPS)) == [(0x7F0000200000, 0x7F0004000000), (0x55D000000000, 0x55D002000000)]


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text() or sys.platform != "linux",
    reason="the system has no transparent huge pages",
)
def test_a_large_region_is_put_into_huge_pages_and_keeps_what_it_holds() -> None:
    with mmap.mmap(-1, 4 * LEAST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for place in range(0, len(region), 4096):
            region[place] = place // 4096 % 251
        before = in_huge_pages()
        done = settle()
        if not done:
            pytest.skip("the kernel cannot do it at once, or has no room")
        assert done >= 4 * LEAST - 2 * PAGE
        assert in_huge_pages() - before >= 4 * LEAST - 2 * PAGE
        assert all(region[place] == place // 4096 % 251 for place in range(0, len(region), 4096))


def in_huge_pages() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))
