"""State dicts: read as plain tensors, weight norm folded, loaded with every key consumed."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from cosytriton_export.errors import CheckpointError

# torch's parametrization and its older hook: (scale per index of dimension 0, direction)
WEIGHT_NORM_SUFFIXES = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)
NAMES_SHOWN = 5


def load_plain(path: Path) -> object:
    """Load a PyTorch file of tensors and plain containers into main memory. No code of the file is run.

    Raises `CheckpointError`: unreadable or truncated, or it would run code.
    """
    try:
        # A mapped file keeps a full-size checkpoint out of memory; the format before torch 1.6 cannot.
        loaded: object = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, because it is more than tensors (a pickle that asks for other objects can run "
            f"code) or is damaged. Nothing of it was run. {_first_line(error)}"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path}: is no readable PyTorch file; it is truncated or something else "
            f"({type(error).__name__}: {_first_line(error)}). Copy it again."
        ) from error
    return loaded


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict of finite tensors; floating ones become float32. No code of the file is run.

    Raises `CheckpointError`: unreadable or truncated, would run code, holds something other than tensors, or
    a tensor that is not finite.
    """
    loaded = load_plain(path)
    if not isinstance(loaded, Mapping) or not loaded:
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not a non-empty state dict.")
    foreign = [k for k, v in loaded.items() if not (isinstance(k, str) and is_plain(v))]
    if foreign:
        raise CheckpointError(
            f"{path}: holds entries that are no plain tensors: {name_some(map(repr, foreign))}. "
            "A plain state dict (name -> tensor) is expected."
        )
    state = {k: v.float() if v.is_floating_point() else v for k, v in loaded.items()}
    broken = [k for k, v in state.items() if not torch.isfinite(v).all()]
    if broken:
        raise CheckpointError(
            f"{path}: NaN or infinite values in {name_some(broken)}. Get another copy of the file."
        )
    return state


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a dense tensor of real numbers."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_complex()
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else ""


def name_some(names: Iterable[str]) -> str:
    """List the first few names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more


def fold_weight_norm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each scale g and direction v by the weight g * v / ||v||, the norm over all dims but 0.

    Weight Normalization, arXiv 1602.07868; both of torch's key layouts are accepted.

    Raises `CheckpointError`: one of the two is missing, their shapes do not fit, or a direction is zero.
    """
    folded = dict(state)
    for scale_suffix, direction_suffix in WEIGHT_NORM_SUFFIXES:
        names = {k.removesuffix(s) for s in (scale_suffix, direction_suffix) for k in state if k.endswith(s)}
        for name in sorted(names):
            scale = folded.pop(name + scale_suffix, None)
            direction = folded.pop(name + direction_suffix, None)
            if scale is None or direction is None:
                raise CheckpointError(
                    f"weight norm of {name!r}: {scale_suffix} or {direction_suffix} is missing."
                )
            folded[f"{name}.weight"] = _folded(name, scale, direction)
    return folded


def _folded(name: str, scale: Tensor, direction: Tensor) -> Tensor:
    if direction.dim() < 2 or scale.shape != (direction.shape[0], *[1] * (direction.dim() - 1)):
        raise CheckpointError(
            f"weight norm of {name!r}: the scale {list(scale.shape)} does not fit "
            f"the direction {list(direction.shape)}."
        )
    norm: Tensor = torch.linalg.vector_norm(direction, dim=tuple(range(1, direction.dim())), keepdim=True)
    if not norm.all():
        raise CheckpointError(f"weight norm of {name!r}: a direction is all zeros.")
    return scale * direction / norm


def load_weights(
    module: nn.Module, state: Mapping[str, Tensor], source: str, unused: Collection[str] = ()
) -> None:
    """Load `state` into `module`, every key of both consumed.

    `state` uses the module's own names; `source` says what it is, for the message; `unused` are keys that
    it may hold although the module has no use for them.
    Raises `CheckpointError`: names the unknown, missing and misshapen keys.
    """
    wanted = module.state_dict()
    given = {k: v for k, v in state.items() if k not in unused or k in wanted}
    problems = {
        "unknown keys": [k for k in given if k not in wanted],
        "missing keys": [k for k in wanted if k not in given],
        "wrong shapes": [
            f"{k} {list(v.shape)} instead of {list(wanted[k].shape)}"
            for k, v in given.items()
            if k in wanted and v.shape != wanted[k].shape
        ],
    }
    found = "; ".join(f"{what}: {name_some(names)}" for what, names in problems.items() if names)
    if found:
        raise CheckpointError(
            f"{source} does not fit its configuration: {found}. "
            "Weights and configuration must come from one checkpoint."
        )
    module.load_state_dict(given, strict=True)
