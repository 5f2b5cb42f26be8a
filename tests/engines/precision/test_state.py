"""What a stream keeps as integers: the same result out of a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from cosytriton_engines.precision.quantize import ONNXRUNTIME, observed, quantizable, quantize
from cosytriton_engines.precision.state import carry_integers
from cosytriton_engines.precision.surgery import load, save
from cosytriton_ensemble.spec import Array, Feed

# Three steps that each read, with one layer, what the frames before and those at hand were in this step.
GRAPH = """
<ir_version: 10, opset_import: ["" : 23]>
stream (float[2, t, 4] x, float[past, 3, 2, 4] attention_state_0)
  => (float[2, t, 4] mel, float[t, 3, 2, 4] attention_state_out_0)
{
  steps = Constant <value_int = 3> ()
  always = Constant <value = bool {1}> ()
  mel, frames = Loop (steps, always, x) <body = step (int64 i, bool go, float[2, t, 4] before)
    => (bool went, float[2, t, 4] after, float[2, t, 4] kept) {
      went = Identity (go)
      kept = Tanh (before)
      row = Gather <axis = 1> (attention_state_0, i)
      past_frames = Transpose <perm = [1, 0, 2]> (row)
      seen = Concat <axis = 1> (past_frames, kept)
      heard = MatMul (seen, layer_weight)
      axes = Constant <value_ints = [1, 2]> ()
      mean = ReduceMean (heard, axes)
      after = Add (before, mean)
  }>
  attention_state_out_0 = Transpose <perm = [2, 0, 1, 3]> (frames)
}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The graph in FP32."""
    text = GRAPH.replace("layer_weight", "w")
    model = onnx.parser.parse_model(text)
    body = next(a.g for node in model.graph.node if node.op_type == "Loop" for a in node.attribute)
    product = next(node for node in body.node if node.op_type == "MatMul")
    product.name, product.input[1] = "layer/MatMul", "layer.weight"
    weight = np.random.default_rng(0).normal(size=(4, 200)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "layer.weight"))
    raw = model.SerializeToString()
    for name in b"attention_state", b"attention_state_out":  # the parser knows no names with a dot
        raw = raw.replace(name + b"_0", name + b".0")
    path = tmp_path / "model.onnx"
    path.write_bytes(raw)
    return path


def quantized(path: Path, keep: tuple[str, ...] = ()) -> ir.Model:
    model = load(path)
    ranges = {str(value.name): (-1.0, 1.0) for value in observed(model)}
    return quantize(model, ranges, keep, ONNXRUNTIME)


def session(model: ir.Model, path: Path) -> ort.InferenceSession:
    save(model, path)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def feed(frames: int, past: Array) -> Feed:
    x = np.random.default_rng(frames).normal(size=(2, frames, 4)).astype(np.float32)
    return {"x": x, "attention_state.0": past}


def test_two_chunks_are_the_same_out_of_a_quarter_of_the_memory(path: Path, tmp_path: Path) -> None:
    real = session(quantized(path), tmp_path / "real.onnx")
    small = session(carry_integers(quantized(path)), tmp_path / "small.onnx")
    states: tuple[Array, Array] = np.zeros((0, 3, 2, 4), np.float32), np.zeros((0, 3, 2, 4), np.uint8)
    for frames in 5, 3:
        (wanted, kept), (given, kept_small) = (
            real.run(None, feed(frames, states[0])),
            small.run(None, feed(frames, states[1])),
        )
        np.testing.assert_array_equal(given, wanted)
        assert kept_small.dtype == np.uint8
        assert 4 * kept_small.nbytes == kept.nbytes > 0
        states = kept, kept_small


def test_what_a_layer_in_fp32_reads_stays_fp32(path: Path, tmp_path: Path) -> None:
    (layer,) = quantizable(load(path))
    kept = session(carry_integers(quantized(path, (layer,))), tmp_path / "kept.onnx")
    assert {value.type for value in (*kept.get_inputs(), *kept.get_outputs())} == {"tensor(float)"}
