"""Which layers stay in higher precision: the noisiest ones, as few as the tolerance allows.

Layers are ranked by what each alone costs. The number of them that is kept doubles until the stage passes,
then it is narrowed down. Every step is written into a journal, so that a search that was stopped goes on
where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_engines.errors import BuildError

Figures = Mapping[str, float]
Attempt = Callable[[Sequence[str]], Figures]
"""The layers that are kept -> quality figures of the graph with the others in lower precision."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One graph that was tried: how many layers it kept, its figures, and whether they pass."""

    kept: int
    figures: Figures
    passed: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Attributes:
        kept: layers in higher precision, the noisiest first.
        trials: what was tried, by the number of layers kept.

    """

    kept: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def figures(self) -> Figures:
        """Of the graph that was chosen."""
        return next(trial.figures for trial in self.trials if trial.kept == len(self.kept))


class Journal:
    """Results of steps that need not be done twice, in one JSON file.

    `identity` names everything that they depend on. A journal of another identity is begun anew.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            self._entries: dict[str, Any] = entries if entries["identity"] == self._key else {}
        except (OSError, ValueError, TypeError, KeyError):
            self._entries = {}

    def recall(self, step: str, compute: Callable[[], Any]) -> Any:
        """The result of a step, JSON values; computed and written down unless it is there."""
        if step not in self._entries:
            self._entries |= {"identity": self._key, step: compute()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_name(f"{self._path.name}.new")
            draft.write_text(json.dumps(self._entries), encoding="utf-8")
            draft.replace(self._path)
        return self._entries[step]


def search(
    name: str,
    ranked: Callable[[], Sequence[Sequence[str]]],
    attempt: Attempt,
    passes: Callable[[Figures], bool],
    curve: bool = False,
) -> Outcome:
    """Find the shortest head of the ranking with which `attempt` passes.

    Args:
        name: of what is searched, for messages.
        ranked: ranks groups of layers, the costliest first; not asked where nothing need be kept.
        attempt: measures the graph that keeps some layers.
        passes: judges its figures.
        curve: try further lengths, so that the loss can be drawn over the layers kept.

    Raises:
        BuildError: not even keeping every ranked layer is enough.

    """
    trials: dict[int, Trial] = {}  # by the number of groups kept
    groups: Sequence[Sequence[str]] = ()

    def passed(length: int) -> bool:
        if length not in trials:
            kept = [layer for group in groups[:length] for layer in group]
            figures = attempt(kept)
            trials[length] = Trial(len(kept), figures, passes(figures))
        return trials[length].passed

    enough = 0
    if not passed(0) or curve:
        groups = ranked()
        lengths = _doubling(len(groups))
        enough = _shortest(lengths, passed)
        for length in lengths if curve else ():
            passed(length)
    if not trials[enough].passed:
        raise BuildError(
            f"{name} does not keep its quality: with {trials[enough].kept} layers in a higher precision it "
            f"has {_text(trials[enough].figures)}. Check the calibration set and the checkpoint."
        )
    kept = tuple(layer for group in groups[:enough] for layer in group)
    return Outcome(kept, tuple(trials[length] for length in sorted(trials)))


def _shortest(lengths: Sequence[int], passed: Callable[[int], bool]) -> int:
    """Look for the shortest length that passes, from the first of `lengths` that does downwards."""
    missing = -1
    for enough in lengths:
        if passed(enough):
            break
        missing = enough
    while enough - missing > 1:
        middle = (enough + missing) // 2
        enough, missing = (middle, missing) if passed(middle) else (enough, middle)
    return enough


def _doubling(total: int) -> list[int]:
    """0, 1, 2, 4 ... and `total`."""
    lengths = [0, *(2**power for power in range(total.bit_length()))]
    return [*(length for length in lengths if length < total), *([total] if total else [])] or [0]


def _text(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
