"""Feeds as files: one safetensors file each, and a folder that appears complete or not at all."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from cosytriton_engines.calibration.material import CalibrationError
from cosytriton_ensemble.manifest import sha256
from cosytriton_ensemble.spec import Feed

_ZEROS = "zeros"  # metadata: name -> type and shape of the tensors that hold zeros alone
_MANY = 1024  # entries from which a tensor of zeros, mostly an empty cache, is only told of


class FeedWriter:
    """Writes feeds to `<folder>/<model>/<number>.safetensors`; knows their digests and sizes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._counts = folder, Counter[str]()
        self.digests: dict[str, str] = {}
        self.sizes: dict[str, int] = {}

    def write(self, model: str, feed: Feed) -> None:
        """Write the next feed of a model; CalibrationError when it holds NaN or infinity."""
        for name, array in feed.items():
            if not np.isfinite(array).all():
                raise CalibrationError(
                    f"The FP32 graphs feed NaN or infinity to {model} ({name}): nothing can be calibrated. "
                    "Export the checkpoint again."
                )
        path = self._folder / model / f"{self._counts[model]:04}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_packed(feed))
        self._counts[model] += 1
        self.digests[f"{model}/{path.name}"] = sha256(path)
        self.sizes[model] = self.sizes.get(model, 0) + path.stat().st_size


def read_feed(path: Path) -> Feed:
    """Read a feed; fresh arrays."""
    with safe_open(path, "np") as file:
        feed: Feed = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        zeros = json.loads(file.metadata()[_ZEROS])
    return feed | {name: np.zeros(shape, dtype) for name, (dtype, shape) in zeros.items()}


def _packed(feed: Feed) -> bytes:
    zeros = {name: array for name, array in feed.items() if array.size >= _MANY and not array.any()}
    told = {name: (array.dtype.str, array.shape) for name, array in zeros.items()}
    tensors = {name: np.ascontiguousarray(array) for name, array in feed.items() if name not in zeros}
    return save(tensors, {_ZEROS: json.dumps(told)})  # one entry: the order of several is random


@contextmanager
def publishing(folder: Path, card: str) -> Iterator[Path]:
    """An empty folder that becomes `folder` at the end, unless something is raised.

    What lies there is replaced if it holds the file `card`; CalibrationError when it holds something else.
    """
    if folder.exists() and not (folder / card).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise CalibrationError(
            f"{folder} exists and is no calibration set; it is left as it is. Choose another folder."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
            draft = Path(place, "new")
            draft.mkdir()
            yield draft
            if folder.exists():
                folder.rename(Path(place, "old"))
            draft.rename(folder)
    except OSError as error:
        raise CalibrationError(f"{folder} cannot be written: {error.strerror}.") from error
