"""A CosyVoice checkpoint directory, opened and checked; `layout` says what stands in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from torch import Tensor

from cosytriton_ensemble.families import FAMILIES, Family
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.layout import LAYOUTS, SPEAKERS, TEXT_MODEL, UNTRAINED, Layout, OnnxName
from cosytriton_export.weights import fold_weight_norm, name_some, read_state

__all__ = ["TEXT_MODEL", "Checkpoint", "OnnxName", "WeightsName", "read_json"]

WeightsName = Literal["llm", "flow", "hift"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: complete, of a known family, its configuration read; weights come on demand."""

    path: Path
    family: Family
    config: Config

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory `path`.

        Raises `CheckpointError`: it is no complete checkpoint of a supported family; the message says which
        files are missing and which families are known.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path}: is no directory. Give the directory of a CosyVoice checkpoint.")
        family = _family(path)
        _check_files(path, family)
        config = load_hyperyaml(path / family.config_file)
        _check_config(config, family)
        return cls(path, family, config)

    @property
    def layout(self) -> Layout:
        """The names of its files."""
        return LAYOUTS[self.family.name]

    @property
    def untrained(self) -> bool:
        """Whether the weights are random, so that its sound is noise."""
        return (self.path / UNTRAINED).exists()

    @cached_property
    def qwen_config(self) -> Config:
        """The language model's sizes: config.json of the Qwen2 directory.

        Raises `CheckpointError`: it is damaged, or the family has none (v1).
        """
        if not self.layout.has_text_model:
            raise CheckpointError(f"{self.path}: {self.family.title} has no Qwen2 directory.")
        path = self.path / TEXT_MODEL / "config.json"
        return Config(read_json(path), str(path))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, over the names and contents of the checkpoint's files."""
        total = hashlib.sha256()
        optional = [SPEAKERS] if (self.path / SPEAKERS).is_file() else []
        for name in sorted((self.family.config_file, *self.layout.files, *optional)):
            with (self.path / name).open("rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def state(self, name: WeightsName) -> dict[str, Tensor]:
        """Read the weights of `<name>.pt`: finite float32 tensors under official keys, weight norm folded.

        A vocoder that was saved during adversarial training has `generator.` in its keys; it is removed.

        Raises `CheckpointError`: see `read_state` and `fold_weight_norm`.
        """
        path = self.path / f"{name}.pt"
        state = read_state(path)
        if name == "hift":
            state = {key.replace("generator.", ""): value for key, value in state.items()}
        try:
            return fold_weight_norm(state)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def onnx(self, name: OnnxName) -> onnx.ModelProto:
        """Read the speaker encoder or the speech tokenizer, with finite weights inside the file.

        Raises `CheckpointError`: it is no ONNX model, keeps its weights elsewhere, or they are not finite.
        """
        path = self.path / self.layout.onnx_files[name]
        try:
            model = onnx.load(path, load_external_data=False)  # another file is never followed
        except (DecodeError, OSError) as error:
            raise CheckpointError(
                f"{path}: is no readable ONNX file; it is truncated or something else."
            ) from error
        if not model.graph.node:
            raise CheckpointError(f"{path}: holds no ONNX graph.")
        tensors = model.graph.initializer
        if any(t.data_location == onnx.TensorProto.EXTERNAL for t in tensors):
            raise CheckpointError(
                f"{path}: keeps weights in another file; one file with all weights is expected."
            )
        broken = [t.name for t in tensors if not _is_finite(path, t)]
        if broken:
            raise CheckpointError(f"{path}: NaN or infinite values in {name_some(broken)}. Get another copy.")
        return model


def _is_finite(path: Path, tensor: onnx.TensorProto) -> bool:
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the weight {tensor.name!r} is damaged ({error}).") from error
    return not np.issubdtype(array.dtype, np.floating) or bool(np.isfinite(array).all())


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises `CheckpointError`: the file holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no readable JSON file ({error}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not a JSON object.")
    return value


def _family(path: Path) -> Family:
    """Tell the family by the yaml file; the official code looks for them in the same order."""
    for family in FAMILIES.values():
        if (path / family.config_file).is_file():
            return family
    known = ", ".join(f"{family.config_file} ({family.title})" for family in FAMILIES.values())
    raise CheckpointError(f"{path}: is no CosyVoice checkpoint, none of {known} is there.")


def _check_files(path: Path, family: Family) -> None:
    files = LAYOUTS[family.name].files
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: lacks {', '.join(missing)}, which belong to {family.config_file}. Copy them there."
        )
    empty = [name for name in (family.config_file, *files) if (path / name).stat().st_size == 0]
    if empty:
        raise CheckpointError(f"{path}: empty files: {', '.join(empty)}. Copy them again.")


def _check_config(config: Config, family: Family) -> None:
    """Check that the yaml file describes this family: classes and rates."""
    given = {module: _class_of(config, module) for module in LAYOUTS[family.name].classes}
    if given != LAYOUTS[family.name].classes:
        fitting = [other for other in FAMILIES.values() if LAYOUTS[other.name].classes == given]
        advice = (
            f"They are those of {fitting[0].title}: name the file {fitting[0].config_file}."
            if fitting
            else f"{family.title} has {', '.join(LAYOUTS[family.name].classes.values())}."
        )
        raise CheckpointError(
            f"{config.where}: its classes {', '.join(given.values())} do not fit its name. {advice}"
        )
    rates = {
        "sample_rate": (config["sample_rate"], family.sample_rate),
        "flow, input_frame_rate": (config["flow"]["input_frame_rate"], family.token_rate),
    }
    for key, (rate, wanted) in rates.items():
        if rate != wanted:
            raise CheckpointError(
                f"{config.where}, {key}: {rate!r} is given, {family.title} has {wanted}. "
                "Variants with other rates are not supported."
            )


def _class_of(config: Config, module: str) -> str:
    value = config[module]
    return value.tag.removeprefix("!new:") if isinstance(value, Config) and value.tag else "none"
