"""Arrivals against what is known of a Poisson process."""

from __future__ import annotations

from itertools import islice

import numpy as np

from cosytriton_loadtests.arrivals import poisson

COUNT = 4000


def due(seed: int, interval: float = 2.0, start: float = 100.0) -> list[float]:
    return list(islice(poisson(np.random.default_rng(seed), interval, start), COUNT))


def test_intervals_are_exponential() -> None:
    gaps = np.diff(due(0), prepend=100.0)
    assert (gaps > 0).all()
    error = 2.0 / COUNT**0.5  # standard error of the mean
    assert abs(gaps.mean() - 2) < 4 * error
    assert abs(gaps.std() - 2) < 8 * error
    assert abs((gaps > 4).mean() - np.exp(-2)) < 0.02


def test_sources_add_up_to_a_poisson_process() -> None:
    """Counts in windows of ten sources: mean and variance are the sum of the rates."""
    times = np.concatenate([due(seed) for seed in range(10)])
    counts = np.histogram(times, np.arange(100, 6000))[0]  # windows of 1 s, 5 expected in each
    assert abs(counts.mean() - 5) < 0.15
    assert abs(counts.var() - 5) < 0.5


def test_the_same_seed_gives_the_same_times() -> None:
    assert due(3) == due(3) != due(4)
