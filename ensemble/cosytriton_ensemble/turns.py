"""Whose turn it is to compute: those whose listener has heard nothing yet go first, others as they come."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
