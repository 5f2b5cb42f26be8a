"""Weights in pages of 2 MiB: a step that reads all of them spends a tenth or more on looking up small pages.

Linux gives such pages to who asks for them (transparent huge pages, "madvise" or "always" in
/sys/kernel/mm/transparent_hugepage/enabled), and since 6.1 at once for memory that is in use already.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = 2 << 20  # bytes
LEAST = 16 << 20  # bytes of a region: larger than a thread's stack, most of which is never touched
_MADV_COLLAPSE = 25
_SMAPS = Path("/proc/self/smaps")
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap\])?$")

logger = logging.getLogger(__name__)


def settle() -> int:
    """Give back what loading left of this process's memory, and put large regions in use into huge pages.

    Returns how many bytes are in such pages now. Where a system has none, nothing changes.
    """
    if not _SMAPS.exists():
        return 0
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # of glibc
        library.malloc_trim(0)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for start, stop in regions(_SMAPS.read_text(encoding="utf-8", errors="replace")):
        if library.madvise(start, stop - start, _MADV_COLLAPSE) == 0:
            done += stop - start
    logger.debug("%d MiB are in huge pages.", done >> 20)
    return done


def regions(smaps: str) -> Iterator[tuple[int, int]]:
    """Whole pages [start, stop) of the regions in /proc/<pid>/smaps that are large and mostly in use."""
    start = stop = 0
    for line in smaps.splitlines():
        if found := _ANONYMOUS.match(line):
            start, stop = (int(address, 16) for address in found.groups())
        elif line.startswith("Rss:"):
            used = int(line.split()[1]) << 10
            if stop - start >= LEAST and 2 * used > stop - start:
                yield -(-start // PAGE) * PAGE, stop // PAGE * PAGE
            start = stop = 0
