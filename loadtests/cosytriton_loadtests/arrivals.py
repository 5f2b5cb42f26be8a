"""When requests are due in an open loop: as callers come who do not know of each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def poisson(rng: np.random.Generator, interval: float, start: float) -> Iterator[float]:
    """The due times of a Poisson source: independent exponential intervals, whatever becomes of the requests.

    The union of independent Poisson sources is one whose rate is the sum of theirs, so that users, workers
    and stages can be added.

    Args:
        rng: randomness.
        interval: mean seconds between two.
        start: seconds since the epoch.
    """
    due = start
    while True:
        due += rng.exponential(interval)
        yield due
