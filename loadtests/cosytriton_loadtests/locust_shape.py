"""Stages of the load as Locust takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from locust import LoadTestShape

from cosytriton_loadtests.shapes import Planned

_MOST_SPAWNED = 100.0  # users in a second: more at once upset Locust


class Shape(LoadTestShape):
    """The stages, one after another.

    Args:
        plan: gives the stages in their order; asked at each start, because the web page changes options.
        began: called with each stage when it begins and that time, in seconds since the epoch.
    """

    use_common_options = True

    def __init__(
        self, plan: Callable[[], Sequence[Planned]], began: Callable[[Planned, float], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan, self._began = plan, began
        self._stages: Sequence[Planned] = ()
        self._last: Planned | None = None

    def reset_time(self) -> None:
        """Begin anew."""
        super().reset_time()  # type: ignore[no-untyped-call]
        self._stages, self._last = self._plan(), None

    def tick(self) -> tuple[int, float] | None:
        """The users that there shall be now and how fast they come or go; None: the end."""
        elapsed = time.perf_counter() - self.start_time
        ends = accumulate(stage.seconds for stage in self._stages)
        stage = next((s for s, end in zip(self._stages, ends, strict=True) if elapsed < end), None)
        if stage is None:
            return None
        if stage is not self._last:
            self._last = stage
            self._began(stage, time.time())
        return stage.users, min(_MOST_SPAWNED, float(stage.users))
