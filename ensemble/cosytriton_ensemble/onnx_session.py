"""Opens a graph on ONNX Runtime, on the device that was asked for or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime as ort

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.names import SHRINKAGE, THREADS_VARIABLE
from cosytriton_ensemble.profiles import Device

_CPU = "CPUExecutionProvider"
_PROVIDERS = {"cpu": [_CPU], "cuda": ["CUDAExecutionProvider", _CPU]}


def session_options(threads: int = 0) -> ort.SessionOptions:
    """Options for shapes that change from call to call, beside other sessions; `threads` = 0: see there."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # one would be kept for every shape
    # Others compute between the calls: idle threads must not spin on their cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


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
