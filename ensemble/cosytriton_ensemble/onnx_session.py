"""Opens a graph on ONNX Runtime, on the device that was asked for or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.names import SHRINKAGE, THREADS_VARIABLE
from cosytriton_ensemble.profiles import Device

_CPU = "CPUExecutionProvider"
_PROVIDERS = {"cpu": [_CPU], "cuda": ["CUDAExecutionProvider", _CPU]}
# Triton: -1 basic, 1 all, 2 all and layout changes; ONNX Runtime's default is all.
_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def session_options(threads: int = 0) -> ort.SessionOptions:
    """Options for shapes that change from call to call, beside other sessions; `threads` = 0: see there."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # one would be kept for every shape
    # Others compute between the calls: idle threads must not spin on their cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def configured_options(config: Mapping[str, Any]) -> tuple[ort.SessionOptions, ort.RunOptions]:
    """Options of a native stage from its Triton configuration, in the words of Triton's C++ backend.

    Read are `optimization.graph.level` and the parameters `intra_op_thread_count`, `inter_op_thread_count`,
    `enable_mem_arena`, `enable_mem_pattern` and `memory.enable_memory_arena_shrinkage`.
    """
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    options = session_options(int(parameters.get("intra_op_thread_count", 0)))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    graph = config.get("optimization", {}).get("graph", {})
    level = graph.get("level", 1)
    options.graph_optimization_level = _LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.enable_cpu_mem_arena = bool(int(parameters.get("enable_mem_arena", 1)))
    options.enable_mem_pattern = bool(int(parameters.get("enable_mem_pattern", 1)))
    return options, shrinking(parameters.get(SHRINKAGE, ""))


def shrinking(arenas: str = "cpu:0") -> ort.RunOptions:
    """Options of a run that then gives back the memory of its arenas that it alone needed; "": none."""
    options = ort.RunOptions()
    options.add_run_config_entry(SHRINKAGE, arenas)
    return options


def open_session(path: Path, options: ort.SessionOptions, device: Device = "cpu") -> ort.InferenceSession:
    """Open the graph at `path` on "cpu" or "cuda"; threads that `options` leave open are the deployment's.

    Raises:
        ServerError: ONNX Runtime does not compute on that device. Left alone, it falls back to the CPU and
            serves at a fraction of the speed.

    """
    wanted = _PROVIDERS.get(device)
    if wanted is None:
        raise ServerError(
            f"ONNX Runtime does not run {path} on {device!r}; it knows {', '.join(_PROVIDERS)}."
        )
    options.intra_op_num_threads = options.intra_op_num_threads or int(os.environ.get(THREADS_VARIABLE) or 0)
    session = ort.InferenceSession(path, options, providers=wanted)
    loaded = session.get_providers()  # those that are available in principle are others
    if wanted[0] not in loaded:
        raise ServerError(
            f"{path} is to run on {device!r}, but ONNX Runtime loaded {', '.join(loaded)} alone. Install "
            "onnxruntime-gpu in place of onnxruntime, with the CUDA and cuDNN that it was built for, or "
            "`serve --profile cpu`."
        )
    return session
