"""Whether TensorRT takes a graph, asked on a machine without a GPU.

TensorRT for RTX is a sibling of TensorRT with the same parser and the same strong typing; it builds
plans on the CPU alone. Its plans are thrown away: this is a gate for the graphs, never the engine that is
served. It is not a dependency; install it where the gate is wanted.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.spec import Size

MODULE = "tensorrt_rtx"
REQUIREMENT = "tensorrt-rtx-cu12==1.7.1.116"
TARGET = "SM80"  # the oldest data-centre architecture among those that it builds for without a GPU

Shapes = Mapping[str, Mapping[Size, tuple[int, ...]]]


class GateError(CosytritonError):
    """TensorRT refuses the graph, or is not there to be asked; the message names nodes and reasons."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """What a build took: parse and build time in seconds, the plan's size in bytes."""

    parse_seconds: float
    build_seconds: float
    plan_bytes: int


def build_gate(onnx_path: Path, profile: Shapes) -> GateResult:
    """Parse the graph strongly typed and build one plan for `profile`, as `Stage.profile()` gives it.

    Raises `GateError` when TensorRT for RTX is not installed, when the parser refuses a node, when the
    profile does not fit the graph's inputs, or when no plan can be built.
    """
    trt = _tensorrt()
    logger = _collecting_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    start = time.perf_counter()
    _parse(trt, logger, network, onnx_path)
    parsed = time.perf_counter()
    plan = builder.build_serialized_network(network, _config(trt, builder, network, profile))
    if plan is None:
        raise GateError(f"{onnx_path}: no plan can be built. " + " ".join(logger.errors))
    return GateResult(parsed - start, time.perf_counter() - parsed, int(plan.nbytes))


def _tensorrt() -> Any:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise GateError(
            f"the gate needs {MODULE}, which is not installed; run `pip install {REQUIREMENT}` "
            f"(no GPU needed). {error}"
        ) from error


def _collecting_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what went wrong for the message of the error."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def _parse(trt: Any, logger: Any, network: Any, onnx_path: Path) -> None:
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_path)):
        errors = (parser.get_error(index) for index in range(parser.num_errors))
        reasons = "; ".join(
            f"{e.node_operator()} {e.node_name()!r}: {e.code().name}, {e.desc()}" for e in errors
        )
        raise GateError(f"{onnx_path}: the parser refuses {reasons or ' '.join(logger.errors)}")


def _config(trt: Any, builder: Any, network: Any, profile: Shapes) -> Any:
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    if names != set(profile):
        raise GateError(f"the graph's inputs are {sorted(names)}, the profile's are {sorted(profile)}.")
    shapes = builder.create_optimization_profile()
    for name, sizes in profile.items():
        shapes.set_shape(name, sizes["min"], sizes["opt"], sizes["max"])
    config = builder.create_builder_config()
    config.add_optimization_profile(shapes)
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, TARGET), 0)
    return config
