"""Counted operations against those that are worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from cosytriton_bench.operations import Work, work_of
from cosytriton_bench.roofline import profiled

SHAPES = {"x": [2, 3, 8], "sound": [1, 4, 10], "state": [1, 8]}


def initial(name: str, *shape: int, kind: type = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, kind), name)


def value(name: str, *shape: int, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], tensors: list[Any]) -> Path:
    graph = helper.make_graph(nodes, "counted", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())
    return path


def count(path: Path, feed: dict[str, Any], *, packed: bool = False) -> Work:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return profiled(path, options, lambda session: session.run(None, feed), packed=packed)


@pytest.fixture
def floating(tmp_path: Path) -> Path:
    """A product, a grouped convolution, and a loop of four turns around a product."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state_in", "turned"], ["product"]),
            helper.make_node("Tanh", ["product"], ["state_out"]),
            helper.make_node("Identity", ["going_in"], ["going_out"]),
        ],
        "body",
        [
            value("turn", kind=TensorProto.INT64),
            value("going_in", kind=TensorProto.BOOL),
            value("state_in", 1, 8),
        ],
        [value("going_out", kind=TensorProto.BOOL), value("state_out", 1, 8)],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["y"]),
        helper.make_node("Conv", ["sound", "kernel"], ["heard"], group=2),
        helper.make_node("Loop", ["turns", "", "state"], ["end"], body=body),
    ]
    tensors = [
        initial("weights", 8, 5),
        initial("kernel", 6, 2, 3),
        initial("turned", 8, 8),
        numpy_helper.from_array(np.array(4, np.int64), "turns"),
    ]
    inputs = [value(name, *shape) for name, shape in SHAPES.items()]
    outputs = [value("y", 2, 3, 5), value("heard", 1, 6, 8), value("end", 1, 8)]
    return save(tmp_path / "floating.onnx", nodes, inputs, outputs, tensors)


FEED = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
PRODUCT, CONV, TURN = 2 * 3 * 5 * 8, 6 * 8 * 2 * 3, 8 * 8


def test_products_convolutions_and_every_turn_of_a_loop_are_counted(floating: Path) -> None:
    work = count(floating, FEED)
    assert (work.fp32, work.int8) == (PRODUCT + CONV + 4 * TURN, 0)
    assert work.weights == 8 * 5 + 6 * 2 * 3 + 4 * 8 * 8
    assert work.weight_bytes == 4 * work.weights


def test_time_is_told_by_kind_without_the_loop_around_it(floating: Path) -> None:
    work = count(floating, FEED, packed=True)
    assert {"MatMul", "Conv", "Tanh"} <= set(work.seconds)
    assert "Loop" not in work.seconds
    assert 0 < work.products < work.seconds.total()
    assert "Tanh" in dict(work.rest)
    assert "MatMul" not in dict(work.rest)


def test_the_last_run_alone_counts(floating: Path) -> None:
    def twice(session: ort.InferenceSession) -> None:
        session.run(None, FEED)
        session.run(None, FEED)

    assert profiled(floating, ort.SessionOptions(), twice, packed=False).fp32 == PRODUCT + CONV + 4 * TURN


def test_attention_is_no_weight(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["q", "k"], ["scores"])]
    inputs = [value("q", 1, 2, 3, 4), value("k", 1, 2, 4, 7)]
    path = save(tmp_path / "attention.onnx", nodes, inputs, [value("scores", 1, 2, 3, 7)], [])
    work = count(path, {"q": np.ones((1, 2, 3, 4), np.float32), "k": np.ones((1, 2, 4, 7), np.float32)})
    assert (work.fp32, work.weights) == (2 * 3 * 7 * 4, 0)


def test_integers_are_counted_apart(tmp_path: Path) -> None:
    tensors = [initial("w", 6, 5, kind=np.int8), initial("a_scale"), initial("w_scale")]
    node = helper.make_node(
        "MatMulIntegerToFloat", ["a", "w", "a_scale", "w_scale"], ["y"], domain="com.microsoft"
    )
    inputs = [value("a", 3, 6, kind=TensorProto.UINT8)]
    path = save(tmp_path / "integers.onnx", [node], inputs, [value("y", 3, 5)], tensors)
    work = count(path, {"a": np.ones((3, 6), np.uint8)})
    assert (work.fp32, work.int8, work.weights, work.weight_bytes) == (0, 3 * 6 * 5, 30, 30)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "multiplied"),
    [
        ("FusedMatMul", [("float", [2, 8, 3]), ("float", [2, 8, 5])], [2, 3, 5], 2 * 3 * 5 * 8),  # transposed
        ("ConvTranspose", [("float", [1, 4, 10]), ("float", [4, 3, 6])], [1, 3, 30], 4 * 10 * 3 * 6),
        (
            "MultiHeadAttention",
            [("float", [2, 5, 64]), ("float", [2, 7, 64])],
            [2, 5, 64],
            2 * 2 * 5 * 7 * 64,
        ),
        (  # two heads of 16 over one of the cache
            "GroupQueryAttention",
            [("float", [3, 1, 64]), ("float", [3, 1, 128, 16])],
            [3, 1, 32],
            2 * 3 * 32 * 128,
        ),
        ("MatMulNBits", [("float", [3, 64]), ("uint8", [10, 2, 32])], [3, 10], 3 * 10 * 64),
        (
            "QLinearConv",
            [("uint8", [1, 4, 9]), ("float", []), ("uint8", []), ("int8", [6, 4, 3])],
            [1, 6, 7],
            6 * 7 * 4 * 3,
        ),
    ],
)
def test_a_kind_of_product(
    kind: str, inputs: list[tuple[str, list[int]]], output: list[int], multiplied: int
) -> None:
    event = {
        "cat": "Node",
        "name": "one_kernel_time",
        "ts": 5,
        "dur": 3,
        "args": {
            "op_name": kind,
            "input_type_shape": [{name: shape} for name, shape in inputs],
            "output_type_shape": [{"float": output}],
        },
    }
    work = work_of([{"name": "model_run", "ts": 1}, event])
    assert work.fp32 + work.int8 == multiplied
