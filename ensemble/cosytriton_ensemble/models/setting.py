"""What a Python model finds around itself when Triton loads it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from cosytriton_ensemble.families import Family, family_named
from cosytriton_ensemble.manifest import check_artifact
from cosytriton_ensemble.names import DEVICE, MODEL_FILE, VOICES_VARIABLE
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.profiles import Device
from cosytriton_ensemble.registry import VoiceFolder
from cosytriton_ensemble.repository import SPEAKERS, TOKENIZER, checkpoint_of, version_directory


@dataclass(frozen=True, slots=True)
class Setting:
    """A model's place in its repository, its family and its parameters."""

    repository: Path
    folder: Path  # of the model's own version
    family: Family
    parameters: dict[str, str]

    @classmethod
    def of(cls, args: dict[str, str]) -> Self:
        """Read what `initialize` is given."""
        model = Path(args["model_repository"])
        entries = json.loads(args["model_config"])["parameters"]
        parameters = {key: entry["string_value"] for key, entry in entries.items()}
        family = family_named(parameters["family"])
        return cls(model.parent, model / args["model_version"], family, parameters)

    @property
    def pipeline(self) -> Pipeline:
        """The declarations of the family."""
        return pipeline_of(self.family)

    @property
    def checkpoint(self) -> str:
        """The identity of the checkpoint that the repository was exported from."""
        return checkpoint_of(self.repository)

    @property
    def tokenizer(self) -> Path:
        """The text tokenizer's file."""
        return version_directory(self.repository, self.pipeline.text_frontend.name) / TOKENIZER

    @property
    def device(self) -> Device:
        """What computes the model's graph."""
        return cast(Device, self.parameters[DEVICE])

    @property
    def has_graph(self) -> bool:
        """Whether the profile serves a graph of the model."""
        return MODEL_FILE in self.parameters

    def graph(self) -> Path:
        """The model's graph or plan; RepositoryError if that does not fit its manifest."""
        path = self.folder / self.parameters[MODEL_FILE]
        check_artifact(path, hashes=False)  # the server that starts this has hashed it
        return path

    def number(self, name: str) -> int:
        """An integer parameter."""
        return int(self.parameters[name])

    def voices(self) -> VoiceFolder:
        """The voices that requests may name: those enrolled, and the checkpoint's own speakers."""
        speakers = version_directory(self.repository, self.pipeline.tts.name) / SPEAKERS
        enrolled = Path(os.environ.get(VOICES_VARIABLE) or self.repository.parent / "voices")
        return VoiceFolder(enrolled, self.checkpoint, speakers)
