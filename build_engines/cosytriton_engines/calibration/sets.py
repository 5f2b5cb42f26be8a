"""Calibration sets: what real speech and text feed to every graph of a repository.

<folder>/set.json                    what it was made of, the sha256 of every feed, warnings
         <model>/0000.safetensors    one feed: the graph's inputs, by name

A set belongs to one checkpoint. It is written under another name and renamed when it is complete, so that a
run that was killed leaves nothing that opens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cosytriton_engines.calibration.builtin_set import builtin_set
from cosytriton_engines.calibration.feed_files import FeedWriter, publishing, read_feed
from cosytriton_engines.calibration.material import CalibrationError, evenly_spaced, read_material
from cosytriton_engines.calibration.recording import SEED, Progress, record
from cosytriton_ensemble.manifest import sha256
from cosytriton_ensemble.repository import check_repository, checkpoint_of
from cosytriton_ensemble.spec import Feed

FORMAT = "cosytriton.calibration.1"
CARD = "set.json"
FEWEST_FEEDS = 2  # one half calibrates, the other judges
TOOLS = ("cosytriton", "numpy", "onnxruntime", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """A set on disk.

    Attributes:
        folder: where it lies.
        checkpoint: identity of the checkpoint whose graphs made the feeds, `family:hash`.
        seed: of the speech tokens that were drawn.
        sources: sha256 of the recordings, transcripts and texts, by file name.
        files: sha256 of each feed, by path below `folder`, in order.
        sizes: bytes of each model's feeds.
        warnings: what is wrong with the material.
        tools: versions of what made it.

    """

    folder: Path
    checkpoint: str
    seed: int
    sources: Mapping[str, str]
    files: Mapping[str, str]
    sizes: Mapping[str, int]
    warnings: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The sha256 of all that decides what is calibrated: every feed in its order, and its origin."""
        facts = [FORMAT, self.checkpoint, self.seed, sorted(self.sources.items()), list(self.files.items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def models(self) -> tuple[str, ...]:
        """The models that there are feeds of."""
        return tuple(self.sizes)

    def count(self, model: str) -> int:
        """How many feeds there are of a model."""
        return len(self._paths(model))

    def feeds(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        """The feeds of a model, always in the same order, one at a time.

        Args:
            model: the name of a stage, "speech_lm", or "text_encoder" of CosyVoice 1.
            limit: give as many at most, at equal distances.

        Yields:
            Fresh arrays by the names of the graph's inputs, with batch dimension.

        Raises:
            CalibrationError: there are no feeds of this model.

        """
        paths = self._paths(model)
        for path in paths if limit is None else evenly_spaced(paths, limit):
            yield read_feed(self.folder / path)

    def calibrating(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        """Every second feed of a model, beginning with the first: what ranges are taken from. As `feeds`."""
        return self._part(model, 0, limit)

    def judging(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        """The feeds between them, which nothing is calibrated on: what variants are judged by. As `feeds`."""
        return self._part(model, 1, limit)

    def _part(self, model: str, start: int, limit: int | None) -> Iterator[Feed]:
        paths = self._paths(model)[start::2]
        return (read_feed(self.folder / path) for path in evenly_spaced(paths, limit or len(paths)))

    def check(self, repository: Path) -> None:
        """Raise `CalibrationError` unless the set was made with the repository's checkpoint."""
        if (wanted := checkpoint_of(repository)) != self.checkpoint:
            raise CalibrationError(
                f"The calibration set {self.folder} was made with another checkpoint "
                f"({self.checkpoint[:24]}…, {repository} has {wanted[:24]}…). "
                f"{_how_to_make(self.folder, repository)}"
            )

    def _paths(self, model: str) -> list[str]:
        if model not in self.sizes:
            raise CalibrationError(
                f"{self.folder} has no feeds of {model!r}; it has {', '.join(self.sizes)}."
            )
        return [path for path in self.files if path.startswith(f"{model}/")]


def make_set(
    repository: Path,
    folder: Path,
    recordings: Path | None = None,
    texts: Path | None = None,
    progress: Progress = lambda _: None,
) -> CalibrationSet:
    """Run the pipeline on recordings and texts, and write what its graphs are fed.

    Equal inputs give equal bits on one machine; another processor rounds otherwise. An older set in `folder`
    is replaced.

    Args:
        repository: a complete model repository.
        folder: of the set.
        recordings: folder of recordings, each with its transcript in a `.txt` where it is known; None: the
            built-in ones.
        texts: file with one text a line; None: the built-in one.
        progress: told what is being done.

    Raises:
        CalibrationError: the material cannot be used, or `folder` holds something else.
        RepositoryError: the repository is incomplete.

    """
    check_repository(repository)
    with ExitStack() as stack:
        if recordings is None or texts is None:
            own_recordings, own_texts = stack.enter_context(builtin_set())
            recordings, texts = recordings or own_recordings, texts or own_texts
        material = read_material(recordings, texts)
        draft = stack.enter_context(publishing(folder, CARD))
        writer = FeedWriter(draft)
        warnings = record(repository, material, writer.write, progress)
        made = CalibrationSet(
            folder,
            checkpoint_of(repository),
            SEED,
            material.digests,
            writer.digests,
            writer.sizes,
            (*material.warnings, *warnings),
            {name: version(name) for name in TOOLS},
        )
        if few := [model for model in made.models if made.count(model) < FEWEST_FEEDS]:
            raise CalibrationError(
                f"{recordings} gives one feed of {', '.join(few)}: nothing would be left to judge by what is "
                "calibrated. Give three recordings or more."
            )
        card = asdict(made) | {"format": FORMAT, "digest": made.digest}
        del card["folder"]
        (draft / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return made


def open_set(folder: Path) -> CalibrationSet:
    """Open a set and verify every file of it.

    Raises:
        CalibrationError: there is none, or it is incomplete, damaged or of another version.

    """
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
        found_format, digest = card.pop("format"), card.pop("digest")
        if found_format != FORMAT:
            raise ValueError(f"its format is {found_format!r}, this version reads {FORMAT!r}")
        found = CalibrationSet(folder, **{**card, "warnings": tuple(card["warnings"])})
        if digest != found.digest:
            raise ValueError(f"its digest in {CARD} does not fit what stands there")
        _verify(found)
    except FileNotFoundError as error:
        name = Path(error.filename).relative_to(folder)
        raise CalibrationError(
            f"{folder} is no calibration set, or an incomplete one: {name} is missing. {_how_to_make(folder)}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"The calibration set {folder} cannot be used: {error}. {_how_to_make(folder)}"
        ) from error
    return found


def _verify(found: CalibrationSet) -> None:
    for name, digest in found.files.items():
        if sha256(found.folder / name) != digest:
            raise ValueError(f"{name} is not the file that was written")
    there = {str(path.relative_to(found.folder)) for path in found.folder.glob("*/*")}
    if foreign := sorted(there - found.files.keys()):
        raise ValueError(f"{foreign[0]} does not belong to it")


def _how_to_make(folder: Path, repository: Path | None = None) -> str:
    return f"Make it again: `cosytriton calibrate --repository {repository or 'REPOSITORY'} --out {folder}`."
