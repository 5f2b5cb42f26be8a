"""TensorRT without NVIDIA: an engine is its ONNX graph, ONNX Runtime computes at the addresses that are set.

The names are those of the real bindings, which `test_tensorrt_api.py` checks. It is stricter than they are:
an updated cache must lie where the cache lay, and all memory within allocations of `cuda`. `GPU` and
`__version__` may be changed, to be another machine.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.helper import tensor_dtype_to_np_dtype

__version__ = "10.16"
GPU = "a GPU of tests"
cuda: Any = None  # the other fake
REFUSED = {"DFT"}  # operators that the parser does not know

Shape = tuple[int, ...]
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
BuilderFlag = IntEnum("BuilderFlag", "VERSION_COMPATIBLE")
MemoryPoolType = IntEnum("MemoryPoolType", "WORKSPACE")
TensorIOMode = IntEnum("TensorIOMode", "INPUT OUTPUT")
ErrorCode = IntEnum("ErrorCode", "INVALID_NODE")


class ILogger:
    Severity = IntEnum("Severity", "INTERNAL_ERROR ERROR WARNING", start=0)

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    pass


class ITensor:
    def __init__(self, name: str) -> None:
        self.name = name


class INetworkDefinition:
    def __init__(self, flags: int) -> None:
        assert flags == 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self._graph = ""
        self._inputs: list[str] = []

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int) -> ITensor:
        return ITensor(self._inputs[index])


class ParserError:
    def __init__(self, node: onnx.NodeProto) -> None:
        self._node = node

    def node_operator(self) -> str:
        return str(self._node.op_type)

    def node_name(self) -> str:
        return str(self._node.name)

    def code(self) -> Any:
        return ErrorCode["INVALID_NODE"]

    def desc(self) -> str:
        return "not known"


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network, self._logger = network, logger
        self._errors: list[ParserError] = []

    def parse_from_file(self, model: str) -> bool:
        try:
            graph = onnx.load(model, load_external_data=False).graph
        except Exception as error:  # noqa: BLE001
            self._logger.log(ILogger.Severity["ERROR"], f"cannot read: {type(error).__name__}")
            return False
        self._errors = [ParserError(node) for node in graph.node if node.op_type in REFUSED]
        self._network._graph, self._network._inputs = model, [value.name for value in graph.input]
        return not self._errors

    def supports_model_v2(self, model: bytes, path: str | None = None) -> bool:  # noqa: ARG002
        return False

    @property
    def num_subgraphs(self) -> int:
        return 0

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]


class IOptimizationProfile:
    def __init__(self) -> None:
        self._shapes: dict[str, tuple[Shape, Shape, Shape]] = {}

    def set_shape(self, input: str, min: Shape, opt: Shape, max: Shape) -> None:
        self._shapes[input] = min, opt, max


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data + b"+"


class IBuilderConfig:
    def __init__(self, logger: ILogger) -> None:
        self.progress_monitor: Any = None
        self._logger = logger
        self._profiles: list[dict[str, tuple[Shape, Shape, Shape]]] = []
        self._cache: ITimingCache | None = None
        self._settings: dict[str, int] = {}

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        for shapes in profile._shapes.values():
            if not all(low <= usual <= high for low, usual, high in zip(*shapes, strict=True)):
                self._logger.log(ILogger.Severity["ERROR"], "MIN<=OPT<=MAX does not hold")
                return -1
        self._profiles.append(profile._shapes)
        return len(self._profiles) - 1

    def set_flag(self, flag: Any) -> None:
        self._settings[flag.name] = 1

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._settings[pool.name] = pool_size

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        return None if serialized_timing_cache == b"damaged" else ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return ignore_mismatch or not cache._data.startswith(b"other GPU")

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache


class IHostMemory(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


class Builder:
    memory: IHostMemory | None = None  # what a build gives instead, where a test sets it
    fails = False
    settings: dict[str, int]  # of the last build

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._logger)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        type(self).settings = config._settings
        monitor = config.progress_monitor
        monitor.phase_start("Building", None, 1)
        for _ in config._profiles:
            monitor.phase_start("Timing", "Building", 2)
            for tactic in ("one", "two"):
                monitor.phase_start(tactic, "Timing", 1)
                assert monitor.step_complete(tactic, 0)
                monitor.phase_finish(tactic)
            monitor.phase_finish("Timing")
        monitor.phase_finish("Building")
        if self.fails:
            self._logger.log(ILogger.Severity["ERROR"], "out of kernels")
            return self.memory
        made = {"graph": network._graph, "profiles": config._profiles, "fits": [GPU, __version__]}
        return IHostMemory(json.dumps(made).encode())


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        made = json.loads(serialized_engine)
        if made["fits"] != [GPU, __version__]:
            self._logger.log(ILogger.Severity["ERROR"], f"made for {made['fits']}")
            return None
        return ICudaEngine(made["graph"], made["profiles"], self._logger)


class ICudaEngine:
    def __init__(self, graph: str, profiles: list[dict[str, list[list[int]]]], logger: ILogger) -> None:
        self._profiles, self._logger = profiles, logger
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        loaded = onnx.load(graph, load_external_data=False).graph
        self._tensors = {value.name: value for value in (*loaded.input, *loaded.output)}
        self._inputs = [value.name for value in loaded.input]
        self._makers = {name: node for node in loaded.node for name in node.output}
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode["INPUT" if name in self._inputs else "OUTPUT"]

    def get_tensor_dtype(self, name: str) -> int:
        return int(self._tensors[name].type.tensor_type.elem_type)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return self._profiles[profile_index][name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        maker = self._makers.get(name)
        return maker.input[0] if maker is not None and maker.op_type == "TensorScatter" else None

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._profile = engine, 0
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle in cuda.streams
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = tuple(shape)
        return all(small <= size <= large for small, size, large in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0, "TensorRT wants addresses of 256 bytes"
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> Shape:
        if self._engine._makers[name].op_type == "NonZero":
            return (1, -1)
        return tuple(self._outputs()[name].shape)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle in cuda.streams
        for name, output in self._outputs().items():
            cache = self._engine.get_aliased_input_tensor(name)
            if cache is not None and self._addresses[name] != self._addresses[cache]:
                self._engine._logger.log(ILogger.Severity["ERROR"], f"{name} is not in place")
                return False
            cuda.array(self._addresses[name], output.nbytes)[:] = output.view(np.uint8).reshape(-1)
        return True

    def _outputs(self) -> dict[str, Any]:
        feed = {name: self._input(name) for name in self._engine._inputs}
        outputs = self._engine._session.run(None, feed)
        names = [value.name for value in self._engine._session.get_outputs()]
        return {n: np.ascontiguousarray(o) for n, o in zip(names, outputs, strict=True)}

    def _input(self, name: str) -> Any:
        dtype = nptype(self._engine.get_tensor_dtype(name))
        size = int(np.prod(self._shapes[name])) * dtype.itemsize
        return cuda.array(self._addresses[name], size).view(dtype).reshape(self._shapes[name]).copy()


def nptype(trt_type: int) -> np.dtype[Any]:
    return tensor_dtype_to_np_dtype(trt_type)
