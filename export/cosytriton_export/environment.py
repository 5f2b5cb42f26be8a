"""What torch reads when it is loaded, and what its exporter would print."""

from __future__ import annotations

import logging
import os
import warnings


def prepare_torch() -> None:
    """Set this process up for an export; to be called before torch is imported."""
    # Threads that wait by spinning take twenty times as long where other processes compute too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch.onnx  # noqa: F401  # it sets log levels of its own

    # The exporter reports each rewrite of the graph and its own deprecations.
    for name in ("onnx_ir", "onnxscript", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"torch\..*|onnxscript\..*|copyreg")
