"""A TensorRT plan from an ONNX graph: one strongly typed road for TensorRT 10.12 and newer, 11, and RTX.

Precision lies in the graph's types: the builder gets no precision flag and no calibrator. TensorRT's bindings
are untyped, so their objects are `Any` in this package; each is named for its class (`builder`, `network`,
`config`, ...), and a test looks every name that is used up on the real classes of several versions.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosytriton_engines.engine.shapes import SIZES, Shapes
from cosytriton_ensemble.errors import CosytritonError

MODULE = "tensorrt"
MIB = 2**20

Progress = Callable[[str], None]
"""Takes a line for whoever waits."""


class EngineError(CosytritonError):
    """TensorRT is missing, or it cannot build, open or run an engine; the message has its own words."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        timing_cache: a file with measured times of kernels, read and written; later builds are faster.
        workspace_mib: limit of the scratch memory of a kernel, in MiB; None: all that the GPU has.
        version_compatible: a newer TensorRT of the same major version may run the plan too. Triton must be
            told (`--backend-config=tensorrt,version-compatible=true`).

    """

    timing_cache: Path | None = None
    workspace_mib: int | None = None
    version_compatible: bool = False


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build took: seconds of parsing and building, bytes of the plan, MiB of host memory at most.

    The memory is that of the whole process since it began.
    """

    parse_seconds: float
    build_seconds: float
    plan_bytes: int
    peak_mib: int


def tensorrt() -> Any:
    """The `tensorrt` module; `EngineError` where it is not installed."""
    return imported(MODULE, "Run inside NVIDIA's container of the Triton release that will serve the plan.")


def imported(module: str, remedy: str) -> Any:
    """A module that is no dependency; `EngineError` with the remedy where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(f"The module {module} cannot be imported ({error}). {remedy}") from error


def build_plan(
    graph: Path,
    profiles: Sequence[Shapes],
    plan: Path,
    *,
    trt: Any,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build an engine and write it to `plan`, which is replaced only by a complete one.

    Args:
        graph: ONNX file; its types are the engine's precision.
        profiles: what `split` or `language_model.profiles` gives; Triton takes the first one by default.
        plan: where the engine goes.
        trt: the module `tensorrt`.
        options: how to build.
        progress: takes a line for each phase.

    Raises:
        EngineError: the graph is refused, a profile does not fit it, or no engine can be built.

    """
    memory, result = build(graph, profiles, trt=trt, options=options, progress=progress)
    replace_file(plan, memory)
    return result


def build(
    graph: Path,
    profiles: Sequence[Shapes],
    *,
    trt: Any,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    adapt: Callable[[Any], None] | None = None,
) -> tuple[Any, BuildResult]:
    """Build an engine in memory, a bytes-like object; see `build_plan`.

    `adapt` may change the builder's configuration before the build.
    """
    options = options or EngineOptions()
    logger, monitor = error_logger(trt), _phase_monitor(trt, progress or _silent)
    builder = trt.Builder(logger)
    start = time.perf_counter()
    network = _parsed(trt, logger, builder, graph)
    parsed = time.perf_counter()
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    _configure(trt, config, options)
    _add_profiles(logger, builder, network, config, profiles, graph)
    if adapt is not None:
        adapt(config)
    memory = builder.build_serialized_network(network, config)
    if memory is None or not memory.nbytes:
        raise EngineError(f"{graph}: no engine can be built. {logger.said()}")
    if options.timing_cache is not None:
        try:
            replace_file(options.timing_cache, config.get_timing_cache().serialize())
        except OSError as error:  # the engine is worth more
            (progress or _silent)(f"TensorRT: the timing cache {options.timing_cache} is not kept ({error})")
    times = parsed - start, time.perf_counter() - parsed
    return memory, BuildResult(*times, int(memory.nbytes), peak_mib())


def _silent(_line: str) -> None:
    """Nobody waits."""


def error_logger(trt: Any) -> Any:
    """A logger of TensorRT that keeps the errors; `said()` is their text for a message."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what went wrong for the message of the error."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

        def said(self) -> str:
            return "TensorRT says: " + (" ".join(self.errors) or "nothing.")

    return Logger()


def replace_file(path: Path, data: Any) -> None:
    """Write bytes to a file that appears whole, or stays as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a plan that is there after a crash of the machine is whole
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def peak_mib() -> int:
    """Most memory that this process has had, in MiB.

    Not `getrusage`: a child process inherits that figure from its parent.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kib = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(kib[1]) // 1024 if kib else 0


def _phase_monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """One line for each phase of the build and for the phases in it, but not for those deeper."""

        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()  # TensorRT calls from several threads
            self._depths: dict[str | None, int] = {None: -1}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            with self._lock:
                known = phase_name in self._depths
                depth = self._depths[phase_name] = self._depths.get(parent_phase, 0) + 1
            if depth <= 1 and not known:
                progress(f"TensorRT: {phase_name}")

        def phase_finish(self, phase_name: str) -> None:
            """A finished phase needs no line: the next one has its own."""

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002
            return True  # go on

    return Monitor()


def _parsed(trt: Any, logger: Any, builder: Any, graph: Path) -> Any:
    network, parser = _empty(trt, logger, builder)
    if parser.parse_from_file(str(graph)):
        return network
    errors = (parser.get_error(index) for index in range(parser.num_errors))
    reasons = [
        f"{error.node_operator()} {error.node_name()!r}: {error.code().name}, {error.desc()}"
        for error in errors
    ]
    raise EngineError(
        f"{graph}: the parser refuses " + "; ".join(reasons or _unsupported(trt, logger, builder, graph))
    )


def _empty(trt: Any, logger: Any, builder: Any) -> tuple[Any, Any]:
    """A network without layers, and its parser."""
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))  # 11 knows nothing else
    return network, trt.OnnxParser(network, logger)


def _unsupported(trt: Any, logger: Any, builder: Any, graph: Path) -> list[str]:
    """What is known of a graph that is refused without a reason for a node: parts, or the log."""
    _, parser = _empty(trt, logger, builder)
    if not graph.is_file() or parser.supports_model_v2(graph.read_bytes(), str(graph)):
        return [logger.said()]
    parts = range(parser.num_subgraphs)
    refused = [parser.get_subgraph_nodes(part) for part in parts if not parser.is_subgraph_supported(part)]
    return [f"nodes {nodes}" for nodes in refused] or [logger.said()]


def _configure(trt: Any, config: Any, options: EngineOptions) -> None:
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib * MIB)
    if options.timing_cache is not None:
        known = options.timing_cache.read_bytes() if options.timing_cache.is_file() else b""
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            # Times of another GPU or TensorRT, or a damaged file: measured anew.
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, ignore_mismatch=False)


def _add_profiles(
    logger: Any, builder: Any, network: Any, config: Any, profiles: Sequence[Shapes], graph: Path
) -> None:
    tensors = (network.get_input(index) for index in range(network.num_inputs))
    names = {tensor.name for tensor in tensors}
    for shapes in profiles:
        if names != set(shapes):
            raise EngineError(
                f"{graph}: the graph's inputs are {sorted(names)}, the profile's are {sorted(shapes)}."
            )
        optimization = builder.create_optimization_profile()
        for name, sizes in shapes.items():
            optimization.set_shape(name, *(sizes[size] for size in SIZES))
        if config.add_optimization_profile(optimization) < 0:
            raise EngineError(f"{graph}: the profile {dict(shapes)} cannot be. {logger.said()}")
