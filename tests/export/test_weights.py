"""Weights are folded and loaded with every key consumed; what does not fit is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosytriton_export.errors import CheckpointError
from cosytriton_export.weights import fold_weight_norm, load_weights

NORM_TOLERANCE = 1e-6


def test_weight_norm_is_folded_in_both_key_layouts() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(3, 5, 4))
    layer.parametrizations.weight.original0.data.uniform_(0.5, 2)
    new = {f"up.{key}": value for key, value in layer.state_dict().items()}
    old = {
        "up.bias": new["up.bias"],
        "up.weight_g": new["up.parametrizations.weight.original0"],
        "up.weight_v": new["up.parametrizations.weight.original1"],
    }
    for state in (new, old):
        folded = fold_weight_norm(state)
        assert sorted(folded) == ["up.bias", "up.weight"]
        torch.testing.assert_close(folded["up.weight"], layer.weight, atol=NORM_TOLERANCE, rtol=0)


def test_foreign_weights_are_refused_with_their_keys() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    state = {"0.weight": torch.ones(3, 4), "1.gamma": torch.ones(1)}
    with pytest.raises(
        CheckpointError,
        match=r"x\.pt does not fit.*unknown keys: 1\.gamma; missing keys: 0\.bias; "
        r"wrong shapes: 0\.weight \[3, 4\] instead of \[3, 2\]",
    ):
        load_weights(module, state, "x.pt")


def test_unused_keys_are_the_ones_that_are_declared() -> None:
    module = nn.Linear(2, 3)
    state = dict(nn.Linear(2, 3).state_dict()) | {"extra": torch.ones(1)}
    load_weights(module, state, "x.pt", unused=["extra"])
    torch.testing.assert_close(module.weight.data, state["weight"])
    with pytest.raises(CheckpointError, match="unknown keys: extra"):
        load_weights(module, state, "x.pt")
