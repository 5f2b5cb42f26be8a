"""Why a limit was missed, in words: who holds the time at the server, which errors came, what grew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.server_figures import CALLERS, Growth, ModelLoad, model_loads
from cosytriton_loadtests.server_watch import Look

LONGEST = 120  # characters of an error's text
MOST_KINDS = 3  # of errors that are listed


@dataclass(frozen=True, slots=True)
class Holding:
    """What one model spends on its requests.

    Attributes:
        load: of the model.
        share: of the time of all models, queues included.
        before: the same model in the baseline.
    """

    load: ModelLoad
    share: float
    before: ModelLoad | None = None

    @property
    def added(self) -> float:
        """Seconds that all requests together lost to this model, beyond the baseline if there is one."""
        now = self.load.queue + self.load.compute
        if self.before is None:
            return now
        return now - self.before.each(self.before.queue + self.before.compute) * self.load.requests

    def __str__(self) -> str:
        load = self.load
        return f"{load.model} holds {self.share:.0%} of the server's time: " + ", ".join(
            f"{what} {_milliseconds(load.each(seconds))} a request{self._former(what)}"
            for what, seconds in (("compute", load.compute), ("queue", load.queue))
        )

    def _former(self, what: str) -> str:
        if self.before is None:
            return ""
        return f" (baseline {_milliseconds(self.before.each(getattr(self.before, what)))})"


def holdings(looks: Sequence[Look], baseline: Sequence[Look] = ()) -> list[Holding]:
    """Who holds the time at the server, the one to blame first.

    Models that only call others are left out, for their time is that of those. Without a baseline
    the one that takes most is to blame, with one the one that takes more than it did.
    """
    loads = work_of(looks)
    before = work_of(baseline)
    whole = sum(load.queue + load.compute for load in loads.values()) or 1.0
    found = [
        Holding(load, (load.queue + load.compute) / whole, before.get(name)) for name, load in loads.items()
    ]
    return sorted(found, key=lambda one: -one.added)


def work_of(looks: Sequence[Look]) -> dict[str, ModelLoad]:
    """Loads of the models that compute themselves."""
    return {name: load for name, load in model_loads(looks).items() if name not in CALLERS and load.requests}


def of_time(looks: Sequence[Look], baseline: Sequence[Look] = ()) -> str:
    """Who holds the time."""
    found = holdings(looks, baseline)
    if not found:
        problem = next((look.problem for look in looks if look.problem), "nobody read the server's metrics")
        return f"no stage can be named: {problem}"
    return str(found[0])


def of_errors(failed: Sequence[Sample]) -> str:
    """Which errors came and where, the most frequent first, with the text of one of them."""
    kinds = Counter(f"{sample.error} in {sample.scenario}" for sample in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(MOST_KINDS))
    first = Counter(_short(sample.message) for sample in failed).most_common(1)
    return ": ".join(filter(None, (counts, *(message for message, _ in first))))


def of_growth(grown: Sequence[Growth]) -> str:
    """Which process grew most."""
    worst = grown[0]
    return f"{worst.name} grew from {worst.before / 1e6:.0f} to {worst.after / 1e6:.0f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _short(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
