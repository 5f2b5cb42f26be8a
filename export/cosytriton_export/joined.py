"""Linear layers of one input as one product: a graph of fewer and larger operators.

A checkpoint names the layers one by one, and so do the modules. Behind `join_products` a graph that is
exported of them has the joined product in their place; run in PyTorch, they compute as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Joining(Protocol):
    """A module some of whose linear layers can be joined."""

    def join(self) -> None:
        """Keep the joined product beside the layers, for the export."""


def join_products(model: nn.Module) -> None:
    """Join what can be joined of a model whose weights are final."""
    for module in list(model.modules()):
        if isinstance(module, Joining):
            module.join()


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Make the layer that gives the outputs of `layers` side by side; their weights become views of its own.

    All have a bias, or none.
    """
    first, widths = layers[0], [layer.out_features for layer in layers]
    product = nn.Linear(first.in_features, sum(widths), bias=first.bias is not None, device="meta")
    for name, _ in list(product.named_parameters()):
        whole = torch.cat([layer.get_parameter(name).detach() for layer in layers])
        setattr(product, name, nn.Parameter(whole, requires_grad=False))
        for layer, part in zip(layers, whole.split_with_sizes(widths), strict=True):
            setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return product


def project(x: Tensor, layers: Sequence[nn.Linear], product: nn.Linear | None) -> Tensor:
    """Give the outputs of `layers` on x [..., in] side by side; a graph gets `product`, if there is one."""
    if product is not None and torch.onnx.is_in_onnx_export():
        out: Tensor = product(x)
        return out
    return torch.cat([layer(x) for layer in layers], -1)
