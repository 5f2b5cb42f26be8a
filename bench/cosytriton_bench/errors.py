"""Errors of this package."""

from __future__ import annotations

from cosytriton_ensemble.errors import CosytritonError


class BenchError(CosytritonError):
    """A benchmark that cannot be run, or would compare what does not compute the same."""
