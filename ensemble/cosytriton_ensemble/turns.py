"""Whose turn it is to compute: those whose listener has heard nothing yet go first, others as they come.

`Turns` is for the threads of one model, which compute one after the other; `Precedence` for the processes of
one server.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Self

from cosytriton_ensemble.names import PRECEDENCE_VARIABLE


class Turns:
    """A lock that those who are `urgent` get before others who have waited longer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, int]] = []
        self._numbers = itertools.count()
        self._taken = False

    @contextmanager
    def take(self, urgent: bool) -> Iterator[None]:
        """Wait for a turn, and have it while the `with` block lasts."""
        with self._changed:
            turn = (not urgent, next(self._numbers))
            heapq.heappush(self._waiting, turn)
            self._changed.wait_for(lambda: not self._taken and self._waiting[0] == turn)
            heapq.heappop(self._waiting)
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


class Precedence:
    """Lets what is urgent have the cores of a server's processes; others wait before their next work.

    Two graphs that run side by side on the same few cores wait for each other's threads, and both take two to
    three times as long. Who is urgent never waits here, so nothing can lock; who is not waits for as long as
    anybody is. It is a lock on a file (flock(2)): the kernel takes it from a process that dies.

    Args:
        file: Exists; None where nobody has to wait, as when a GPU computes.

    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @classmethod
    def here(cls) -> Self:
        """Among the processes of the server that has started this one."""
        file = os.environ.get(PRECEDENCE_VARIABLE)
        return cls(Path(file) if file else None)

    @contextmanager
    def turn(self, urgent: bool) -> Iterator[None]:
        """Compute in the `with` block: at once, or when nobody is urgent."""
        with self._file.open("rb") if self._file else nullcontext() as file:
            if file:
                fcntl.flock(file, fcntl.LOCK_SH if urgent else fcntl.LOCK_EX)
                if not urgent:
                    fcntl.flock(file, fcntl.LOCK_UN)  # one that becomes urgent meanwhile need not wait
            yield
