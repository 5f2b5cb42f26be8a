"""The manifest beside an artifact: what it was made from and what it fits.

`<artifact>.manifest.json` is written after its artifact, so that an artifact without a manifest, left by a
build that was killed, is never believed. `check_artifact` compares one with the files and the machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU, FP32_GRAPH, Precision, model_of, profile_of, text_encoder_of

VERSION = "1"  # of every model in the repository
SUFFIX = ".manifest.json"
_PIPELINE = pipeline_of(COSYVOICE2)  # every family's stages have these names
_UNLEARNED = {stage.name for stage in _PIPELINE.native_stages if not stage.learned}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of an artifact.

    Attributes:
        stage: the Triton model it belongs to.
        artifact: its file name.
        files: sha256 of the artifact and of the files that lie beside it for it, by file name.
        checkpoint: digest of the checkpoint.
        family: of the checkpoint.
        untrained: whether the checkpoint has random weights.
        precision: of the weights.
        tools: versions of what made it.
        source: sha256 of the files that it was built from, by file name; empty for what the export wrote.
        calibration: digest of the calibration set it was built with, None if none was needed.
        opset: of a graph.
        tolerance, errors: what the check against its source allowed and found; some figures only inform.
        better: which direction of a figure is: "lower", which need not be said, or "higher".
        kept: layers in higher precision than the rest, each with the reason.
        tensorrt: version that built a plan.
        gpu: name and compute capability of the GPU that a plan was built on, "NVIDIA L4 8.9".
        portable: "" for a plan that runs on this GPU and version alone, or "version" where it may be newer.

    """

    stage: str
    artifact: str
    files: Mapping[str, str]
    checkpoint: str
    family: str
    untrained: bool
    precision: Precision
    tools: Mapping[str, str]
    source: Mapping[str, str] = field(default_factory=dict)
    calibration: str | None = None
    opset: int | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    better: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    tensorrt: str | None = None
    gpu: str | None = None
    portable: str = ""

    @classmethod
    def read(cls, artifact: Path) -> Self:
        """The manifest of an artifact; RepositoryError when there is none or it is damaged."""
        path = manifest_path(artifact)
        try:
            return cls(**_checked(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise RepositoryError(
                f"{artifact} cannot be trusted: its manifest {path.name} cannot be read ({error}). "
                f"{how_to_make(artifact)}"
            ) from error

    def write(self, folder: Path) -> None:
        """Write it beside its artifact in `folder`."""
        text = json.dumps(asdict(self), indent=2)
        manifest_path(folder / self.artifact).write_text(text + "\n", encoding="utf-8")


# What JSON holds for a field, or for each entry of one that is a mapping, by its annotation.
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "Precision": (str,),
    "bool": (bool,),
    "float": (float, int),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
}


def _checked(values: Any) -> dict[str, Any]:
    """The fields that a manifest's JSON holds; ValueError unless it has all of them, and no others."""
    kinds = {entry.name: str(entry.type) for entry in fields(Manifest)}
    given = values.keys() if isinstance(values, dict) else set()
    if unknown := sorted(given - kinds.keys()):
        raise ValueError(f"it has the unknown {', '.join(unknown)}")
    if missing := sorted(kinds.keys() - given):
        raise ValueError(f"it lacks {', '.join(missing)}")
    if wrong := [f"{name} is no {kind}" for name, kind in kinds.items() if not _fits(values[name], kind)]:
        raise ValueError(", ".join(wrong))
    return dict(values)


def _fits(value: Any, kind: str) -> bool:
    entry = kind.removeprefix("Mapping[str, ").removesuffix("]")
    if entry != kind:
        return isinstance(value, dict) and all(_fits(part, entry) for part in value.values())
    return isinstance(value, _JSON_TYPES[kind])


def manifest_path(artifact: Path) -> Path:
    """Where the manifest of an artifact lies."""
    return artifact.with_name(f"{artifact.name}{SUFFIX}")


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of each file in a folder, by name."""
    return {file.name: sha256(file) for file in sorted(folder.iterdir())}


def identity_of(repository: Path) -> Manifest:
    """The manifest whose checkpoint is the repository's: that of the exported flow."""
    return Manifest.read(repository / _PIPELINE.flow.name / VERSION / FP32_GRAPH)


def how_to_make(artifact: Path) -> str:
    """The sentence that names the command which makes an artifact again."""
    repository, profile = artifact.parents[2], profile_of(model_of(artifact.name))
    if profile is None:
        return f"Run `cosytriton export CHECKPOINT --repository {repository}`."
    return f"Run `cosytriton build --profile {profile.name} --repository {repository}`."


def check_artifact(artifact: Path, machine: Machine | None = None, *, hashes: bool = True) -> Manifest:
    """Refuse an artifact that does not fit its manifest, its repository or this machine.

    Args:
        artifact: `<repository>/<model>/1/<file>`.
        machine: where it is to run; asked about this one, if a plan needs to know, when it is not given.
        hashes: whether every file is read. Without, only what is not older than its manifest is: the models
            of a server that has read all files need not read gigabytes again, and yet notice what was
            replaced meanwhile.

    Raises:
        RepositoryError: What is wrong first, what is allowed, and the command that mends it.

    """
    manifest = Manifest.read(artifact)
    for fault in _faults(artifact, manifest, machine, hashes):
        raise RepositoryError(f"{artifact} {fault}. {how_to_make(artifact)}")
    return manifest


def _faults(artifact: Path, manifest: Manifest, machine: Machine | None, hashes: bool) -> Iterator[str]:
    """Each ends a sentence that begins with the artifact."""
    yield from _misplaced(artifact, manifest)
    ancestors = _ancestors(artifact, manifest)
    yield from _changed(artifact, manifest, ancestors, hashes)
    yield from _stale({artifact: manifest} | ancestors, hashes)
    yield from _unlike(manifest, [*ancestors.values(), identity_of(artifact.parents[2])])
    yield from _unmade(manifest)
    if artifact.suffix == ".plan":
        yield from _foreign(manifest, machine or Machine.here())


def _misplaced(artifact: Path, manifest: Manifest) -> Iterator[str]:
    """It is the manifest of this file, by its place, its name and the precision that the name promises."""
    model, profile = artifact.parents[1].name, profile_of(artifact.name)
    if manifest.stage != model:
        yield f"has the manifest of the stage {manifest.stage!r}; it belongs to {model!r}"
    if manifest.artifact != artifact.name:
        yield f"has the manifest of {manifest.artifact!r}; it is {artifact.name!r}"
    precision = profile.precision if profile and model not in _UNLEARNED else CPU.precision
    if manifest.precision != precision:
        yield f"has the precision {manifest.precision!r} by its manifest, but {precision!r} by its name"


def _changed(
    artifact: Path, manifest: Manifest, ancestors: Mapping[Path, Manifest], hashes: bool
) -> Iterator[str]:
    """Its files are there, and are those that the manifest was written for."""
    models = artifact.name, text_encoder_of(artifact.name)
    needed = {
        name for model in models for name in (model, f"{model}.data") if artifact.with_name(name).exists()
    }
    if any(text_encoder_of(path.name) in source.files for path, source in ancestors.items()):
        needed.update(models)
    if unlisted := sorted(needed - manifest.files.keys()):
        yield f"is not covered by its manifest: that lists no {', '.join(unlisted)}"
    for name, wanted in manifest.files.items():
        file = artifact.with_name(name)
        if not file.is_file():
            yield f"is not whole: its manifest lists {name}, which is missing"
        elif (now := _digest(file, artifact, hashes)) != wanted:
            yield f"is not what its manifest was written for: {name} has sha256 {now}, not {wanted}"


def _ancestors(artifact: Path, manifest: Manifest) -> dict[Path, Manifest]:
    """The manifests of what it was built from, and of what that was built from."""
    found, waiting = {artifact: manifest}, [(artifact, manifest)]
    for path, known in waiting:
        for source in {path.with_name(model_of(name)) for name in known.source} - found.keys():
            found[source] = Manifest.read(source)
            waiting.append((source, found[source]))
    del found[artifact]
    return found


def _stale(line: Mapping[Path, Manifest], hashes: bool) -> Iterator[str]:
    """What was built was built from what is there now."""
    for path, manifest in line.items():
        if profile_of(path.name) and not manifest.source:
            yield f"cannot be compared with its source: the manifest of {path.name} names none"
        for name, then in manifest.source.items():
            source, owner = (path.with_name(each) for each in (name, model_of(name)))
            if (now := _digest(source, owner, hashes)) != then:
                yield f"is stale: {path.name} was built from {name} with sha256 {then}, which is {now} now"


def _unlike(manifest: Manifest, kin: Iterable[Manifest]) -> Iterator[str]:
    """It comes from the checkpoint that everything else comes from."""
    for other in kin:
        place = f"{other.stage}/{VERSION}/{other.artifact}"
        for name in ("checkpoint", "family", "untrained"):
            given, wanted = getattr(manifest, name), getattr(other, name)
            if given != wanted:
                yield f"does not belong to {place}: its {name} is {given!r}, there it is {wanted!r}"


def _unmade(manifest: Manifest) -> Iterator[str]:
    """Its manifest says how it was made, and that it was good enough."""
    if not manifest.tools:
        yield "does not say what made it: its manifest has no tools"
    if manifest.precision == "int8" and manifest.calibration is None:
        yield "is INT8, but its manifest names no calibration set"
    if manifest.source and not manifest.tolerance:
        yield "was never compared with its source: its manifest has no tolerance"
    for name, limit in manifest.tolerance.items():
        value, higher = manifest.errors.get(name), manifest.better.get(name) == "higher"
        if value is None:
            yield f"was not measured: its manifest limits {name!r}, but does not say what it is"
        elif not (value >= limit if higher else value <= limit):  # NaN is neither
            bound = "at least" if higher else "at most"
            yield f"is beyond its tolerance: {name!r} is {value:g}, allowed is {bound} {limit:g}"


def _foreign(manifest: Manifest, machine: Machine) -> Iterator[str]:
    """A plan runs on the TensorRT and the GPU that built it."""
    here = f"this machine has {machine.tensorrt or 'none'}"
    if manifest.tensorrt is None:
        yield "is a plan, but its manifest does not say which TensorRT built it"
    elif not _runs(manifest.tensorrt, machine.tensorrt, newer=manifest.portable == "version"):
        newer = "this or a newer one of its major version"
        allowed = newer if manifest.portable == "version" else "this one"
        yield f"was built by TensorRT {manifest.tensorrt} and runs on {allowed}; {here}"
    if manifest.gpu is None:
        yield "is a plan, but its manifest does not say which GPU it was built on"
    elif manifest.gpu != machine.gpu:
        yield f"was built on the GPU {manifest.gpu!r}; this machine has {machine.gpu or 'none'}"


def _runs(built: str, here: str | None, *, newer: bool) -> bool:
    """Whether two versions agree in major, minor and patch; or in major and the second may be newer."""
    if here is None:
        return False
    old, new = ([int(part) for part in re.findall(r"\d+", version)[:3]] for version in (built, here))
    return new[:1] == old[:1] and new >= old if newer else new == old


def _digest(file: Path, owner: Path, hashes: bool) -> str:
    """The sha256 of a file; by its owner's manifest where it need not be read, or is not there."""
    if file.is_file():
        state = file.stat()
        if hashes or state.st_mtime_ns >= manifest_path(owner).stat().st_mtime_ns:
            return _digest_of(file, state.st_size, state.st_mtime_ns)
    return Manifest.read(owner).files.get(file.name, "unknown")


@lru_cache(maxsize=256)
def _digest_of(file: Path, _size: int, _changed_ns: int) -> str:
    """As `sha256`, once for each state of a file: several artifacts come from one graph."""
    return sha256(file)
