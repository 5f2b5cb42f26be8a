"""The errors of the export; both are `CosytritonError`."""

from __future__ import annotations

from cosytriton_ensemble.errors import CosytritonError


class CheckpointError(CosytritonError):
    """A checkpoint directory, or a file of it, cannot be read as what it claims to be."""


class ExportError(CosytritonError):
    """A stage cannot be exported, or its graph is outside its tolerance."""
