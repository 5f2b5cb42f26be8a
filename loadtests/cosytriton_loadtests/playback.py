"""What a listener hears of the chunks of an answer.

The model: playback starts with the first chunk and runs in real time; when the buffer is empty it waits for
the next chunk (an underrun) and goes on with that one's beginning. A unary answer is one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cosytriton_loadtests.samples import Chunk, Sample

AUDIBLE_DBFS = -50.0  # level of a window that is heard; a full-scale square wave has 0
WINDOW_SECONDS = 0.01


def audible(samples: npt.NDArray[np.float32], rate: int) -> float | None:
    """Seconds until the first 10 ms window whose RMS is above -50 dBFS; None: there is none.

    Args:
        samples: float32 [n] in [-1, 1].
        rate: Hz.
    """
    window = max(1, round(WINDOW_SECONDS * rate))
    starts = np.arange(0, len(samples), window)
    if not len(starts):
        return None
    power = np.add.reduceat(np.square(samples, dtype=np.float64), starts)
    lengths = np.minimum(window, len(samples) - starts)
    heard = power / lengths > 10 ** (AUDIBLE_DBFS / 10)
    return float(starts[heard.argmax()] / rate) if heard.any() else None


def played_at(chunks: Sequence[Chunk]) -> list[float]:
    """When the playback of each chunk starts, in seconds since the epoch."""
    starts: list[float] = []
    free = float("-inf")  # when all that came before has been played
    for chunk in chunks:
        starts.append(max(free, chunk.at))
        free = starts[-1] + chunk.seconds
    return starts


def first_audible(sample: Sample) -> float | None:
    """Seconds from the intended time until something can be heard; None: nothing can."""
    for start, chunk in zip(played_at(sample.chunks), sample.chunks, strict=True):
        if chunk.audible is not None:
            return start + chunk.audible - sample.intended
    return None


def gaps(sample: Sample) -> list[float]:
    """Seconds between the arrivals of chunks that follow each other."""
    return [later.at - earlier.at for earlier, later in pairwise(sample.chunks)]


def underruns(sample: Sample) -> list[float]:
    """Seconds that playback waits for each chunk but the first one; 0 where it came in time."""
    starts = played_at(sample.chunks)
    ends = (start + chunk.seconds for start, chunk in zip(starts, sample.chunks, strict=True))
    return [start - end for end, start in zip(ends, starts[1:], strict=False)]


def worst_underrun(sample: Sample) -> float:
    """The longest of them in seconds; 0 when there is none."""
    return max(underruns(sample), default=0.0)
