"""Q/DQ for TensorRT and for ONNX Runtime, and weights in blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from cosytriton_engines.precision.half import half_names, to_half
from cosytriton_engines.precision.probe import layer_noise, value_ranges
from cosytriton_engines.precision.quantize import (
    ONNXRUNTIME,
    TENSORRT,
    Form,
    degraded,
    observed,
    quantizable,
    quantize,
    quantize_tables,
    quantize_weights,
)
from cosytriton_engines.precision.surgery import load, save
from cosytriton_ensemble.spec import Array

CHANNELS, FRAMES = 32, 24
RNG = np.random.default_rng(0)
FEED = {"x": RNG.normal(0, 1, (2, CHANNELS, FRAMES)).astype(np.float32)}


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Two convolutions and a product: y = (relu(conv(conv(x))))^T W."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    network (float[n, {CHANNELS}, t] x) => (float[n, t, {CHANNELS}] y)
    {{
        a = Conv <pads = [1, 1]> (x, conv1, bias1)
        b = Conv <pads = [1, 1]> (a, conv2, bias2)
        c = Relu (b)
        d = Transpose <perm = [0, 2, 1]> (c)
        y = MatMul (d, product)
    }}
    """
    model = ir.from_onnx_text(text)
    arrays = {
        "conv1": RNG.normal(0, 0.1, (CHANNELS, CHANNELS, 3)),
        "bias1": RNG.normal(0, 1, CHANNELS),
        "conv2": RNG.normal(0, 0.1, (CHANNELS, CHANNELS, 3)),
        "bias2": RNG.normal(0, 1, CHANNELS),
        "product": RNG.normal(0, 0.2, (CHANNELS, CHANNELS)),
    }
    for node in model.graph:
        node.name = str(node.outputs[0].name)
        for index, value in enumerate(node.inputs):
            if value is not None and value.name in arrays:
                name = f"{value.name}.weight" if "bias" not in str(value.name) else str(value.name)
                tensor = ir.tensor(arrays[str(value.name)].astype(np.float32), name=name)
                constant = ir.val(name, const_value=tensor)
                model.graph.register_initializer(constant)
                node.replace_input_with(index, constant)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    return path


def outputs(path: Path, level: str = "ORT_ENABLE_ALL") -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    output: Array = ort.InferenceSession(str(path), options).run(None, FEED)[0]
    return output


def decibels(wanted: Array, given: Array) -> float:
    return float(10 * np.log10((wanted**2).sum() / ((wanted - given) ** 2).sum()))


def quantized(stage: Path, form: Form, keep: tuple[str, ...] = ()) -> Path:
    ranges = value_ranges(stage, [FEED], observed)
    path = stage.with_name("quantized.onnx")
    save(quantize(load(stage), ranges, keep, form), path)
    return path


@pytest.mark.parametrize("form", [TENSORRT, ONNXRUNTIME], ids=["tensorrt", "onnxruntime"])
def test_is_close_to_fp32_and_small(form: Form, stage: Path) -> None:
    path = quantized(stage, form)
    assert 28 < decibels(outputs(stage), outputs(path)) < 45, "8 bits, not more and not less"
    weights = sum(v.const_value.nbytes for v in load(path).graph.initializers.values() if v.const_value)
    assert weights < 0.45 * stage.stat().st_size


def test_tensorrt_gets_symmetric_signed_integers_and_real_biases(stage: Path) -> None:
    model = load(quantized(stage, TENSORRT))
    pairs = [n for n in model.graph if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {n.inputs[2].const_value.numpy().dtype for n in pairs} == {np.dtype(np.int8)}  # type: ignore[union-attr]
    assert not any(n.inputs[2].const_value.numpy().any() for n in pairs)  # type: ignore[union-attr]
    convolutions = [n for n in model.graph if n.op_type == "Conv"]
    assert all(n.inputs[2].const_value.dtype == ir.DataType.FLOAT for n in convolutions)  # type: ignore[union-attr]


def test_scales_for_tensorrt_are_halves(stage: Path) -> None:
    """They become half precision: what is rounded then would shift every weight."""
    model = load(quantized(stage, TENSORRT))
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            scale = node.inputs[1].const_value.numpy()  # type: ignore[union-attr]
            np.testing.assert_array_equal(scale, scale.astype(np.float16))


def test_onnxruntime_computes_in_integers(stage: Path, tmp_path: Path) -> None:
    """Its optimizer fuses Q/DQ only where everything is as it wants it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # that of the server
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(quantized(stage, ONNXRUNTIME)), options)
    operators = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    assert operators.count("QLinearConv") == 2
    assert "MatMulIntegerToFloat" in operators
    assert "Conv" not in operators
    assert "MatMul" not in operators


def test_around_half_precision_every_layer_is_half(stage: Path) -> None:
    model = load(quantized(stage, TENSORRT))
    to_half(model, half_names(load(stage)))
    for node in model.graph:
        if node.op_type in ("Conv", "MatMul", "QuantizeLinear", "DequantizeLinear"):
            reals = [v.dtype for v in (*node.inputs, *node.outputs) if v and v.dtype != ir.DataType.INT8]
            assert set(reals) == {ir.DataType.FLOAT16}, node.name
    save(model, stage.with_name("half.onnx"))
    assert 25 < decibels(outputs(stage), outputs(stage.with_name("half.onnx"))) < 45


def test_the_bias_of_a_dead_channel_survives(stage: Path) -> None:
    """Its weights are zero: in units of their scale no 32 bits would hold it."""
    model = load(stage)
    for node in model.graph:
        if node.op_type == "Conv" and node.inputs[1] is not None and node.inputs[1].const_value is not None:
            weight = node.inputs[1].const_value.numpy().copy()
            weight[3] = 0
            node.inputs[1].const_value = ir.tensor(weight, name=node.inputs[1].name)
    save(model, stage)
    assert decibels(outputs(stage), outputs(quantized(stage, ONNXRUNTIME))) > 28


def test_kept_layers_stay(stage: Path) -> None:
    operators = {
        n.name: [v.producer() for v in n.inputs if v] for n in load(quantized(stage, TENSORRT, ("b",))).graph
    }
    quantizing = {
        name
        for name, makers in operators.items()
        if any(m and m.op_type == "DequantizeLinear" for m in makers)
    }
    assert {"a", "y"} <= quantizing
    assert "b" not in quantizing


def test_noise_of_all_layers_is_about_that_of_the_graph(stage: Path) -> None:
    """What each layer alone adds predicts what all add together: the ranking means something."""
    ranges = value_ranges(stage, [FEED], observed)
    noise = layer_noise(stage, [FEED], lambda m: list(quantizable(m).values()), degraded(ranges, TENSORRT))
    assert noise.keys() == {"a", "b", "y"}
    together = -decibels(outputs(stage), outputs(quantized(stage, TENSORRT)))
    assert 10 * np.log10(sum(noise.values())) == pytest.approx(together, abs=3)


def test_weights_in_blocks_are_those_of_onnxruntimes_own_quantizer(stage: Path) -> None:
    path = stage.with_name("blocks.onnx")
    save(quantize_weights(load(stage), ()), path)
    config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, accuracy_level=4, bits=8)
    theirs = MatMulNBitsQuantizer(onnx.load(stage), algo_config=config)
    theirs.process()
    onnx.save(theirs.model.model, stage.with_name("theirs.onnx"))
    wanted = outputs(stage)
    ours, others = (decibels(wanted, outputs(stage.with_name(f"{n}.onnx"))) for n in ("blocks", "theirs"))
    assert ours == pytest.approx(others, abs=2)
    assert ours > 30


def test_rows_do_not_depend_on_each_other(stage: Path) -> None:
    """One scale for a whole batch would let one request change another's numbers."""
    path = stage.with_name("blocks.onnx")
    save(quantize_weights(load(stage), ()), path)
    session = ort.InferenceSession(str(path))
    together = session.run(None, {"x": FEED["x"] * np.array([1, 100], np.float32)[:, None, None]})[0]
    alone = session.run(None, {"x": FEED["x"][:1]})[0]
    np.testing.assert_allclose(together[:1], alone, rtol=0, atol=1e-6)


@pytest.fixture
def embedding(tmp_path: Path) -> Callable[[Array], Path]:
    def write(table: Array) -> Path:
        text = """
        <ir_version: 10, opset_import: ["" : 18]>
        graph (int64[n] ids) => (float[n, w] y) { y = Gather (table, ids) }
        """
        model = ir.from_onnx_text(text)
        value = ir.val("table", const_value=ir.tensor(table, name="table"))
        model.graph.register_initializer(value)
        model.graph[0].replace_input_with(0, value)
        ir.save(model, tmp_path / "embedding.onnx")
        return tmp_path / "embedding.onnx"

    return write


def test_embeddings_have_a_scale_for_each_row(embedding: Callable[[Array], Path]) -> None:
    table = RNG.normal(0, 1, (2000, 64)).astype(np.float32) * np.geomspace(1e-3, 1e3, 2000)[:, None].astype(
        "f4"
    )
    path = embedding(table)
    model = quantize_tables(load(path))
    save(model, path.with_name("small.onnx"))
    assert path.with_name("small.onnx").stat().st_size < 0.3 * path.stat().st_size
    ids = np.array([0, 999, 1999, 3])
    given = ort.InferenceSession(str(path.with_name("small.onnx"))).run(None, {"ids": ids})[0]
    for row, wanted in zip(given, table[ids], strict=True):
        np.testing.assert_allclose(row, wanted, rtol=0, atol=np.abs(wanted).max() / 254 * 1.01)


def test_positions_that_are_sliced_have_a_scale_for_each_channel(tmp_path: Path) -> None:
    """The relative positions of CosyVoice 1's language model."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    graph (int64[1] count) => (float[2, 64, p] y)
    <int64[1] first = {0}, int64[1] axis = {2}>
    { y = Slice (table, first, count, axis) }
    """
    model = ir.from_onnx_text(text)
    table = RNG.normal(0, 1, (2, 64, 1000)).astype(np.float32) * np.geomspace(1e-3, 1e3, 64)[:, None].astype(
        "f4"
    )
    value = ir.val("table", const_value=ir.tensor(table, name="table"))
    model.graph.register_initializer(value)
    model.graph[0].replace_input_with(0, value)
    save(quantize_tables(model), tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < 0.3 * table.nbytes
    given = ort.InferenceSession(str(tmp_path / "small.onnx")).run(None, {"count": np.array([300])})[0]
    wanted = table[:, :, :300]
    assert given.shape == wanted.shape
    assert (np.abs(given - wanted).max((0, 2)) <= np.abs(table).max((0, 2)) / 254 * 1.01).all()


def test_a_table_that_two_look_up_is_stored_once(embedding: Callable[[Array], Path]) -> None:
    path = embedding(RNG.normal(0, 1, (2000, 64)).astype(np.float32))
    model = load(path)
    again = ir.node("Gather", list(model.graph[0].inputs))
    total = ir.node("Add", [model.graph[0].outputs[0], again.outputs[0]])
    model.graph.extend([again, total])
    again.outputs[0].dtype = total.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.outputs[0] = total.outputs[0]
    save(quantize_tables(model), path.with_name("small.onnx"))
    assert path.with_name("small.onnx").stat().st_size < 0.3 * path.stat().st_size


def test_small_tables_are_left_alone(embedding: Callable[[Array], Path]) -> None:
    model = quantize_tables(load(embedding(np.zeros((10, 4), np.float32))))
    assert [node.op_type for node in model.graph] == ["Gather"]


def test_products_that_read_16_bits_lose_what_their_weights_lose(stage: Path) -> None:
    """The rest of each activation is multiplied too: only the weights' 8 bits are left to be heard."""
    wanted, coarse = outputs(stage), outputs(quantized(stage, ONNXRUNTIME, keep=("a", "b")))
    model = load(stage)
    ranges = value_ranges(stage, [FEED], observed)
    save(quantize(model, ranges, ("a", "b"), ONNXRUNTIME, fine=("y",)), stage.with_name("fine.onnx"))
    fine = outputs(stage.with_name("fine.onnx"))
    assert decibels(wanted, fine) > decibels(wanted, coarse) + 1
    assert decibels(outputs(stage.with_name("fine.onnx"), "ORT_DISABLE_ALL"), fine) > 80
