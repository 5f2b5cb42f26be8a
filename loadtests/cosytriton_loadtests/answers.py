"""The audio of a share of the answers of a run, kept so that the same request can be compared when alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.waveforms import Samples

FOLDER = "answers"  # within that of the run
SHARE = 0.1


def lot(request: Mapping[str, Any]) -> float:
    """A number in [0, 1) that a request draws by what it asks for, its seed included."""
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True, slots=True)
class Answers:
    """Audio by its digest (`Sample.digest`), in float32 files of numpy.

    Attributes:
        folder: made with the first answer.
        share: of the requests, those with the lowest lots.
    """

    folder: Path
    share: float = SHARE

    def keep(self, sample: Sample, parts: Sequence[Samples]) -> None:
        """Keep what was heard, if the request was drawn and spoken to its end."""
        if sample.error or sample.cancelled or not sample.digest or lot(sample.request) >= self.share:
            return
        self.folder.mkdir(exist_ok=True)
        np.save(self._file(sample), np.concatenate(parts))

    def get(self, sample: Sample) -> Samples | None:
        """What was heard, or None: it was not kept."""
        file = self._file(sample)
        return np.load(file) if file.is_file() else None

    def _file(self, sample: Sample) -> Path:
        return self.folder / f"{sample.digest}.npy"
