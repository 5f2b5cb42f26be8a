"""A CosyVoice checkpoint directory, in the official layout.

cosyvoice2.yaml                sizes of all modules (its name tells the family)
llm.pt  flow.pt  hift.pt       state dicts
campplus.onnx                  speaker encoder
speech_tokenizer_v2.onnx       speech tokenizer
CosyVoice-BlankEN/             Qwen2 sizes (config.json) and the text tokenizer
UNTRAINED                      only in a checkpoint with random weights
"""

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

from cosytriton_ensemble.pipeline import COSYVOICE2, Family
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.weights import fold_weight_norm, name_some, read_state

WeightsName = Literal["llm", "flow", "hift"]
OnnxName = Literal["campplus", "speech_tokenizer"]

TEXT_MODEL = "CosyVoice-BlankEN"
UNTRAINED = "UNTRAINED"
# The official code looks for these names in this order; a value of None is a family that is not supported.
CONFIG_FILES: dict[str, Family | None] = {
    "cosyvoice.yaml": None,
    "cosyvoice2.yaml": COSYVOICE2,
    "cosyvoice3.yaml": None,
}
ONNX_FILES: dict[OnnxName, str] = {
    "campplus": "campplus.onnx",
    "speech_tokenizer": "speech_tokenizer_v2.onnx",
}
FILES = (
    "llm.pt",
    "flow.pt",
    "hift.pt",
    *ONNX_FILES.values(),
    f"{TEXT_MODEL}/config.json",
    f"{TEXT_MODEL}/vocab.json",
    f"{TEXT_MODEL}/merges.txt",
    f"{TEXT_MODEL}/tokenizer_config.json",
)


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
            raise CheckpointError(f"{path}: is no directory. Give the directory of a CosyVoice2 checkpoint.")
        config_file = _config_file(path)
        _check_files(path, config_file)
        family = CONFIG_FILES[config_file]
        assert family is not None  # _config_file refuses the others
        return cls(path, family, load_hyperyaml(path / config_file))

    @property
    def untrained(self) -> bool:
        """Whether the weights are random, so that its sound is noise."""
        return (self.path / UNTRAINED).exists()

    @cached_property
    def qwen_config(self) -> Config:
        """The language model's sizes: config.json of the Qwen2 directory."""
        path = self.path / TEXT_MODEL / "config.json"
        return Config(read_json(path), str(path))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, over the names and contents of the checkpoint's files."""
        total = hashlib.sha256()
        for name in sorted((*FILES, _config_file(self.path))):
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
        """Read the graph `campplus.onnx` or `speech_tokenizer_v2.onnx`, with finite weights inside the file.

        Raises `CheckpointError`: it is no ONNX model, keeps its weights elsewhere, or they are not finite.
        """
        path = self.path / ONNX_FILES[name]
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


def _config_file(path: Path) -> str:
    known = ", ".join(f"{f.name} ({name})" for name, f in CONFIG_FILES.items() if f)
    found = [name for name in CONFIG_FILES if (path / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{path}: is no CosyVoice checkpoint, none of {', '.join(CONFIG_FILES)} is there. "
            f"Supported: {known}."
        )
    if CONFIG_FILES[found[0]] is None:
        raise CheckpointError(
            f"{path}: holds {found[0]}, a CosyVoice family that is not supported yet. Supported: {known}."
        )
    return found[0]


def _check_files(path: Path, config_file: str) -> None:
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: lacks {', '.join(missing)}, which belong to {config_file}. Copy them there."
        )
    empty = [name for name in (config_file, *FILES) if (path / name).stat().st_size == 0]
    if empty:
        raise CheckpointError(f"{path}: empty files: {', '.join(empty)}. Copy them again.")
