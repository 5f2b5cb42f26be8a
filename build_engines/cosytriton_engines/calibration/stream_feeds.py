"""What the flow is fed, for its form that carries the state of a stream: rows alone, nothing carried yet.

Ranges do not depend on where a chunk begins, for what is carried are values of earlier frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort

from cosytriton_engines.calibration.graphs import open_graph
from cosytriton_engines.calibration.sets import CalibrationSet
from cosytriton_ensemble import names
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.streaming_flow import ATTENTION, CONVOLUTION, TOKEN_END

_FLOW = "flow"


class StreamFeeds:
    """A calibration set's feeds of the flow, as those of the graph at `path`."""

    def __init__(self, calibration: CalibrationSet, path: Path) -> None:
        self._calibration = calibration
        self._inputs = open_graph(path).get_inputs()

    def calibrating(self, model: str, limit: int | None = None) -> Iterator[Feed]:  # noqa: ARG002  (of `Feeds`)
        """What ranges are taken from."""
        return self._rows(self._calibration.calibrating(_FLOW, limit))

    def judging(self, model: str, limit: int | None = None) -> Iterator[Feed]:  # noqa: ARG002  (of `Feeds`)
        """What variants are judged by."""
        return self._rows(self._calibration.judging(_FLOW, limit))

    def _rows(self, feeds: Iterator[Feed]) -> Iterator[Feed]:
        for feed in feeds:
            for row in range(len(feed[names.TOKENS])):
                yield self._of({name: array[row : row + 1] for name, array in feed.items()})

    def _of(self, row: Feed) -> Feed:
        row |= {TOKEN_END: row[names.PROMPT_TOKEN_COUNT] + row[names.TOKEN_COUNT]}
        return {value.name: row.get(value.name, _nothing(value)) for value in self._inputs}


def _nothing(value: ort.NodeArg) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The state before the first frame: no frames, and zeros before them."""
    if not value.name.startswith((ATTENTION, CONVOLUTION)):
        return np.zeros(0, np.float32)  # which is given
    return np.zeros([size if isinstance(size, int) else 0 for size in value.shape], np.float32)
