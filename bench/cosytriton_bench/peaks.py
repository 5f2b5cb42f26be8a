"""What the machine can do at most: streaming reads, and products of large matrices on ONNX Runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from cosytriton_ensemble.spec import Array

READ_BYTES = 1 << 29  # of each thread, more than any cache holds
SIZE = 1536  # rows and columns of the matrices
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of a machine.

    Attributes:
        name: of the machine.
        fp: multiply-adds a second in the precision of its floating-point graphs.
        int8: multiply-adds a second of 8-bit integers.
        bandwidth: bytes a second that are read from memory.

    """

    name: str
    fp: float
    int8: float
    bandwidth: float

    def seconds(self, fp: float, int8: float, weight_bytes: float) -> float:
        """The least time for products, or for reading their weights if that is longer."""
        return max(fp / self.fp + int8 / self.int8, weight_bytes / self.bandwidth)


def measured_peaks(threads: int = 0, read_bytes: int = READ_BYTES, size: int = SIZE) -> Peaks:
    """Measure this machine; some seconds. The best of several tries counts."""
    threads = threads or len(os.sched_getaffinity(0))
    return Peaks(
        f"this CPU, {threads} threads",
        size**3 / _best(_product(_fp32_graph(size), size, np.float32, threads)),
        size**3 / _best(_product(_int8_graph(size), size, np.uint8, threads)),
        threads * read_bytes / _best(_reading(threads, read_bytes)),
    )


def _best(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _reading(threads: int, read_bytes: int) -> Callable[[], object]:
    # Different numbers: a host may keep equal pages of its guests once, and so in its cache.
    blocks = [np.arange(read_bytes // 8, dtype=np.float64) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.sum, blocks))


def _product(graph: bytes, size: int, kind: type, threads: int) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    matrix: Array = np.ones((size, size), kind)
    return lambda: session.run(None, {"a": matrix})


def _fp32_graph(size: int) -> bytes:
    weights = numpy_helper.from_array(np.ones((size, size), np.float32), "b")
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    return _model([node], [weights], TensorProto.FLOAT, size)


def _int8_graph(size: int) -> bytes:
    constants = {
        "b": np.ones((size, size), np.int8),
        "a_scale": np.float32(1),
        "b_scale": np.float32(1),
        "a_zero": np.uint8(0),
        "b_zero": np.int8(0),
    }
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs = ["a", "b", "a_scale", "b_scale", "a_zero", "b_zero"]
    node = helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft")
    return _model([node], tensors, TensorProto.UINT8, size)


def _model(nodes: list[NodeProto], tensors: list[TensorProto], kind: int, size: int) -> bytes:
    shape = [size, size]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("a", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        tensors,
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    return serialized
