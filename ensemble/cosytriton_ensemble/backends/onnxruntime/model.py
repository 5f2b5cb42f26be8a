"""A Triton backend named `onnxruntime` for servers that lack the C++ one: it reads the same configuration.

Triton batches, queues, caches and warms up; this file opens the graph and runs it. Read from the
configuration: `default_model_filename`, the instances' kind, and what `configured_options` knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.manifest import check_artifact
from cosytriton_ensemble.onnx_session import configured_options, open_session
from cosytriton_ensemble.profiles import Device
from cosytriton_ensemble.spec import Array, Feed


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
            options, self._run_options = configured_options(config)
            self._session = open_session(path, options, device)
        except CosytritonError as error:
            raise pb.TritonModelException(str(error)) from error
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
