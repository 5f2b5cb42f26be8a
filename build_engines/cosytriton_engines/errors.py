"""Errors of building."""

from __future__ import annotations

from cosytriton_ensemble.errors import CosytritonError


class BuildError(CosytritonError):
    """A graph or a plan that cannot be built, or does not keep its quality; nothing was replaced."""
