"""The speakers that a checkpoint brings along: spk2info.pt, a voice by name.

An entry is either an embedding alone (the fine-tuned speakers of CosyVoice 1), or all that is known of a
reference recording: its embedding, speech tokens, mel spectrogram and text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.pipeline import MAX_REFERENCE_SECONDS, MEL_BINS, SPEAKER_SIZE
from cosytriton_ensemble.registry import check_name
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.layout import SPEAKERS
from cosytriton_export.weights import is_plain, load_plain

# The official front end writes the same value once for the language model and once for the flow.
_EMBEDDING_KEYS = ("embedding", "llm_embedding", "flow_embedding")
_TOKEN_KEYS = ("llm_prompt_speech_token", "flow_prompt_speech_token")
_MEL_KEY = "prompt_speech_feat"
_TEXT_KEY = "prompt_text"


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice: its embedding and, if a reference is known, what was said in it and how it sounds.

    Without a reference its arrays are empty.
    """

    name: str
    embedding: npt.NDArray[np.float32]  # [192]
    prompt_tokens: npt.NDArray[np.int32]  # [n] speech codes
    prompt_mel: npt.NDArray[np.float32]  # [m, 80] log-mel frames
    prompt_text_ids: npt.NDArray[np.int32]  # [k] text ids


def read_speakers(checkpoint: Checkpoint) -> dict[str, Speaker]:
    """Read the speakers of `checkpoint` by name, in the order of the file; none without the file.

    Raises `CheckpointError`: the file is damaged or would run code, or an entry has an unusable name, wrong
    shapes, ids without a row, numbers that are not finite, or only half of a reference.
    """
    path = checkpoint.path / SPEAKERS
    if not path.is_file():
        return {}
    loaded = load_plain(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not a mapping of names to speakers.")
    speakers = {}
    for name, entry in loaded.items():
        try:
            speakers[_usable_name(name)] = _speaker(name, entry, checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: the speaker {name!r}: {error}") from error
    return speakers


def _usable_name(name: object) -> str:
    """Clients give the name and logs show it: no controls, nothing that could pass for a path."""
    try:
        return check_name(name if isinstance(name, str) else "")
    except InputError as error:
        raise CheckpointError(f"this is no usable name. {error}") from error


def _speaker(name: str, entry: object, checkpoint: Checkpoint) -> Speaker:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{type(entry).__name__} is given, not a mapping of keys to tensors.")
    embedding = _embedding(entry)
    tokens = _ids(entry, _TOKEN_KEYS, checkpoint.config["llm"]["speech_token_size"])
    mel = _mel(entry)
    _check_reference(tokens, mel, checkpoint)
    text = _ids(entry, (_TEXT_KEY,), _text_rows(checkpoint)) if len(tokens) else tokens
    return Speaker(name, embedding, tokens, mel, text)


def _embedding(entry: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    values = [_numbers(entry, key, (SPEAKER_SIZE,)) for key in _EMBEDDING_KEYS if key in entry]
    if not values:
        raise CheckpointError(f"there is no embedding; one of {', '.join(_EMBEDDING_KEYS)} is expected.")
    embedding: npt.NDArray[np.float32] = _only(values, _EMBEDDING_KEYS)
    if not embedding.any():
        raise CheckpointError("its embedding is all zeros.")
    return embedding


def _mel(entry: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    if _MEL_KEY not in entry:
        return np.zeros((0, MEL_BINS), np.float32)
    mel = _numbers(entry, _MEL_KEY, (-1, MEL_BINS))
    return mel[: _length(entry, _MEL_KEY, len(mel))]


def _ids(entry: Mapping[str, Any], keys: Iterable[str], rows: int) -> npt.NDArray[np.int32]:
    values = []
    for key in (key for key in keys if key in entry):
        tensor = _tensor(entry, key)
        if tensor.is_floating_point() or tensor.numel() != tensor.shape[-1:].numel():
            raise CheckpointError(f"{key}: whole numbers [1, n] are expected, {_seen(tensor)} is given.")
        if ((tensor < 0) | (tensor >= rows)).any():
            raise CheckpointError(f"{key}: ids from 0 to {rows - 1} are expected.")
        count = _length(entry, key, tensor.numel())
        values.append(tensor.reshape(-1)[:count].to(torch.int32).numpy())
    return _only(values, keys) if values else np.zeros(0, np.int32)


def _numbers(entry: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Float32 of `shape`; the given tensor may have dimensions of size one in front."""
    tensor = _tensor(entry, key)
    leading = tensor.shape[: -len(shape)]
    if tensor.dim() < len(shape) or tensor.shape[-1] != shape[-1] or leading.numel() != 1:
        wanted = ", ".join("n" if size < 0 else str(size) for size in (1, *shape))
        raise CheckpointError(f"{key}: numbers [{wanted}] are expected, {_seen(tensor)} is given.")
    values: npt.NDArray[np.float32] = tensor.reshape(shape).to(torch.float32).numpy()
    if not np.isfinite(values).all():
        raise CheckpointError(f"{key}: NaN or infinite values.")
    return values


def _tensor(entry: Mapping[str, Any], key: str) -> Tensor:
    value = entry[key]
    if not is_plain(value):
        raise CheckpointError(f"{key}: {type(value).__name__} is given, not a plain tensor.")
    return value


def _seen(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _length(entry: Mapping[str, Any], key: str, most: int) -> int:
    """The valid length, which may stand beside a value."""
    length = entry.get(f"{key}_len")
    if length is None:
        return most
    count = int(length) if isinstance(length, Tensor) and length.numel() == 1 else -1
    if not 0 <= count <= most:
        raise CheckpointError(f"{key}_len: a number from 0 to {most} is expected.")
    return count


def _only(values: list[Any], keys: Iterable[str]) -> Any:
    if any(not np.array_equal(values[0], other) for other in values[1:]):
        raise CheckpointError(f"{' and '.join(keys)} must be equal: a voice has one reference.")
    return values[0]


def _check_reference(
    tokens: npt.NDArray[np.int32], mel: npt.NDArray[np.float32], checkpoint: Checkpoint
) -> None:
    family = checkpoint.family
    if bool(len(tokens)) != bool(len(mel)):
        raise CheckpointError("its reference is half there: speech tokens and mel frames belong together.")
    frames_a_second = family.frames(family.token_rate) + 1
    if (
        len(tokens) > MAX_REFERENCE_SECONDS * family.token_rate
        or len(mel) > MAX_REFERENCE_SECONDS * frames_a_second
    ):
        raise CheckpointError(f"its reference is longer than {MAX_REFERENCE_SECONDS} s.")
    # In version 1 the two are cut by hand and may differ a little.
    if not family.fade_frames and len(mel) != family.frames(len(tokens)):
        raise CheckpointError(
            f"{len(mel)} mel frames do not fit {len(tokens)} speech tokens, "
            f"which have {family.frames(len(tokens))}."
        )


def _text_rows(checkpoint: Checkpoint) -> int:
    if checkpoint.layout.has_text_model:
        return int(checkpoint.qwen_config["vocab_size"])
    return int(checkpoint.config["llm"]["text_token_size"])
