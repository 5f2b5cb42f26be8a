"""The flow: speech tokens to mel, as PyTorch modules with the official key names."""

from __future__ import annotations

from collections.abc import Mapping

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.flow.cosyvoice1 import MaskedDiffFlow
from cosytriton_export.flow.cosyvoice2 import CausalUNetFlow
from cosytriton_export.flow.cosyvoice3 import CausalDiTFlow

__all__ = ["CausalDiTFlow", "CausalUNetFlow", "MaskedDiffFlow", "flow_of"]

FLOWS: Mapping[str, type[MaskedDiffFlow | CausalUNetFlow | CausalDiTFlow]] = {
    COSYVOICE1.name: MaskedDiffFlow,
    COSYVOICE2.name: CausalUNetFlow,
    COSYVOICE3.name: CausalDiTFlow,
}


def flow_of(checkpoint: Checkpoint) -> MaskedDiffFlow | CausalUNetFlow | CausalDiTFlow:
    """Build the flow of a checkpoint; `CheckpointError` when weights and configuration do not fit."""
    source = str(checkpoint.path / "flow.pt")
    flow = FLOWS[checkpoint.family.name]
    return flow.from_config(checkpoint.config["flow"], checkpoint.state("flow"), source)
