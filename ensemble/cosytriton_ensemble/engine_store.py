"""Where plans lie that several machines share: one repository for each kind of machine and export.

<engines>/<key>/model_repository/            a copy of the exported repository, with the plans of that key
                timing.cache, calibration/   what `cosytriton build` keeps beside a repository
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from cosytriton_ensemble.errors import RepositoryError, ServerError
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.repository import exported_files, family_of

DIGEST = 12  # hexadecimal digits of the export in a key


def engine_key(repository: Path, machine: Machine | None = None) -> str:
    """GPU product, TensorRT version and what was exported from which checkpoint, as the name of a folder.

    ServerError on a machine that runs no plans.
    """
    machine = machine or Machine.here()
    if machine.gpu is None or machine.tensorrt is None:
        lacks = "GPU" if machine.gpu is None else "TensorRT"
        raise ServerError(
            f"There is no engine key here: it names a GPU and a TensorRT, and this machine has no {lacks}. "
            "Run this in the GPU image with a GPU, or serve a profile of ONNX Runtime without --engines."
        )
    digest = hashlib.sha256(b"\n".join(file.read_bytes() for file in exported_files(repository))).hexdigest()
    parts = (machine.gpu, f"trt-{machine.tensorrt}", f"{family_of(repository).name}-{digest[:DIGEST]}")
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()) for part in parts)


def check_key(key: str, pinned: str | None) -> None:
    """Refuse a machine or checkpoint that is not the pinned one."""
    if pinned not in (None, key):
        raise ServerError(
            f"The engine key here is {key}, not {pinned}: the engines were built for another GPU, TensorRT "
            "or checkpoint. Build for this one with `cosytriton build --engines`, or give its key."
        )


def repository_of(engines: Path, key: str) -> Path:
    """Where the repository of a key lies, or is to lie."""
    return engines / key / "model_repository"


def engine_repository(engines: Path, key: str) -> Path:
    """The repository of a key; RepositoryError when nothing was built for it."""
    repository = repository_of(engines, key)
    if not repository.is_dir():
        known = ", ".join(sorted(path.parent.name for path in engines.glob("*/model_repository"))) or "none"
        raise RepositoryError(
            f"{engines} has no engines for {key}; it has {known}. Run `cosytriton build --engines {engines}` "
            "on such a machine."
        )
    return repository


def begin_repository(source: Path, engines: Path, key: str) -> Path:
    """The repository of a key to build in; where there is none, a copy of `source`, whole or not at all."""
    repository = repository_of(engines, key)
    if not repository.is_dir():
        part = repository.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        part.replace(repository)
    return repository
