"""A Triton backend named `onnxruntime` for servers that lack the C++ one: it reads the same configuration.

Triton batches, queues, caches and warms up; this file opens the graph and runs it. Read from the
configuration: `default_model_filename`, the instances' kind, `optimization.graph.level`, and the C++
backend's parameters `intra_op_thread_count`, `inter_op_thread_count`, `enable_mem_arena`,
`enable_mem_pattern` and `memory.enable_memory_arena_shrinkage`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb

from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.manifest import check_artifact
from cosytriton_ensemble.names import SHRINKAGE
from cosytriton_ensemble.onnx_session import open_session, shrinking
from cosytriton_ensemble.profiles import Device
from cosytriton_ensemble.spec import Array, Feed

# Triton: -1 basic, 1 all, 2 all and layout changes; ONNX Runtime's default is all.
_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class TritonPythonModel:
    """One ONNX Runtime session."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """The committed configurations are complete."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph that the configuration names."""
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"]) / args["model_version"] / config["default_model_filename"]
        device: Device = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        try:
            check_artifact(path, hashes=False)  # the server that starts this has hashed it
            self._session = open_session(path, session_options(config), device)
        except CosytritonError as error:
            raise pb.TritonModelException(str(error)) from error
        self._run_options = shrinking(_parameters(config).get(SHRINKAGE, ""))
        self._inputs = [i.name for i in self._session.get_inputs()]
        self._outputs = [o.name for o in self._session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests as one batch; Triton has seen to it that their shapes agree."""
        feeds = [self._read(request) for request in requests]
        try:
            return self._run(feeds)
        except Exception as error:  # noqa: BLE001  (any failure of the graph must become a response)
            if len(feeds) == 1:
                return [pb.InferenceResponse(error=pb.TritonError(str(error)))]
            # One bad row must not fail the others.
            return [response for request in requests for response in self.execute([request])]

    def _read(self, request: Any) -> Feed:
        return {name: pb.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}

    def _run(self, feeds: list[Feed]) -> list[Any]:
        rows = [len(feed[self._inputs[0]]) for feed in feeds]
        batch = {name: np.concatenate([feed[name] for feed in feeds]) for name in self._inputs}
        outputs: list[Array] = self._session.run(self._outputs, batch, self._run_options)
        parts = [np.split(output, np.cumsum(rows)[:-1]) for output in outputs]
        return [
            pb.InferenceResponse(
                [
                    pb.Tensor(name, np.ascontiguousarray(part[i]))
                    for name, part in zip(self._outputs, parts, strict=True)
                ]
            )
            for i in range(len(feeds))
        ]


def session_options(config: dict[str, Any]) -> ort.SessionOptions:
    """ONNX Runtime options from a Triton model configuration."""
    options = ort.SessionOptions()
    parameters = _parameters(config)
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    level = config.get("optimization", {}).get("graph", {}).get("level", 1)
    options.graph_optimization_level = _LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.enable_cpu_mem_arena = bool(int(parameters.get("enable_mem_arena", 1)))
    options.enable_mem_pattern = bool(int(parameters.get("enable_mem_pattern", 1)))
    # Several models share the cores: a pool that spins while it waits takes them from the others.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _parameters(config: dict[str, Any]) -> dict[str, str]:
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
