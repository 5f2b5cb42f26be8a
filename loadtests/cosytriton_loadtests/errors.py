"""What goes wrong in a load test, apart from what the load test measures."""

from __future__ import annotations

from cosytriton_ensemble.errors import CosytritonError


class LoadTestError(CosytritonError):
    """The load test cannot be run or judged as it was asked for."""
