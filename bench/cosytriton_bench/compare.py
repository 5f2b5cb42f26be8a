"""This run beside an earlier one: what became slower beyond the noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cosytriton_bench.measure import Figure
from cosytriton_bench.results import Results

LEAST_CHANGE = 0.15  # quiet runs of the same code differ by less


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of two runs."""

    name: str
    before: Figure
    now: Figure

    @property
    def ratio(self) -> float:
        """How much more time, memory, ... it takes than before; 1 is the same, also of a rate."""
        if self.before.median <= 0 or self.now.median <= 0:  # of a difference nothing but its sign says much
            return float("inf") if self.worse else 0.0
        more = self.now.median / self.before.median
        return more if self.now.lower_is_better else 1 / more

    @property
    def worse(self) -> bool:
        """Whether it is worse than before, by however little."""
        return (self.now.median > self.before.median) == self.now.lower_is_better

    @property
    def beyond_noise(self) -> bool:
        """Whether the medians are further apart than the samples of both runs, and than `LEAST_CHANGE`."""
        apart = abs(self.now.median - self.before.median)
        noise = max(self.before.spread + self.now.spread, LEAST_CHANGE * abs(self.before.median))
        return apart > noise

    def __str__(self) -> str:
        word = "worse" if self.worse else "better"
        return (
            f"{word}: {self.name} {self.before.median:.4g} -> {self.now.median:.4g} {self.now.unit} "
            f"({self.now.median / self.before.median:.2f} of before)"
            if self.before.median
            else f"{word}: {self.name} 0 -> {self.now.median:.4g} {self.now.unit}"
        )


def changes(before: Results, now: Results) -> list[Change]:
    """Figures of both runs that differ beyond the noise, the worst first."""
    shared = (
        Change(name, before.figures[name], one) for name, one in now.figures.items() if name in before.figures
    )
    return sorted((change for change in shared if change.beyond_noise), key=lambda change: -change.ratio)


def differences(before: Results, now: Results) -> Iterator[str]:
    """What makes two runs hard to compare: other settings, another machine."""
    for kind, ours, theirs in (
        ("settings", now.settings, before.settings),
        ("machine", now.machine, before.machine),
    ):
        for key in sorted(set(ours) | set(theirs)):
            if key != "load" and ours.get(key) != theirs.get(key):
                yield f"{kind}, {key}: {theirs.get(key)} before, {ours.get(key)} now"
