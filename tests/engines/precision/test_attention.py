"""Attention as products: the same numbers, also in a loop, and none of the operator left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from cosytriton_engines.precision.attention import decompose_attention, skip_empty_masks
from cosytriton_engines.precision.surgery import load, save
from cosytriton_ensemble.spec import Array, Feed

GRAPH = """
<ir_version: 10, opset_import: ["" : 23]>
mixing (float[b, t, 6] x, float[b, k, 6] seen, float[b, 1, t, k] mask) => (float[b, t, 6] y)
<int64 steps = {2}, bool go = {1}>
{
  y = Loop (steps, go, x) <body = step (int64 number, bool on, float[b, t, 6] query)
      => (bool again, float[b, t, 6] mixed) {
    again = Identity (on)
    mixed = Attention <q_num_heads = 3, kv_num_heads = 3 SCALE> (query, seen, seen MASK)
  }>
}
"""


def feed(seed: int) -> Feed:
    rng = np.random.default_rng(seed)
    x, seen = (rng.normal(size=(2, n, 6)).astype(np.float32) for n in (4, 5))
    return {"x": x, "seen": seen, "mask": -rng.random((2, 1, 4, 5)).astype(np.float32)}


def run(path: Path, given: Feed) -> Array:
    result: Array = ort.InferenceSession(path).run(None, given)[0]
    return result


@pytest.mark.parametrize("scale", ["", ", scale = 2.0"])
@pytest.mark.parametrize("mask", ["", ", mask"])
def test_products_give_what_attention_gives(tmp_path: Path, scale: str, mask: str) -> None:
    given, made = tmp_path / "given.onnx", tmp_path / "made.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH.replace(" SCALE", scale).replace(" MASK", mask)), given)
    model = decompose_attention(load(given))
    assert "Attention" not in {node.op_type for node in model.graph.all_nodes()}
    save(model, made)
    np.testing.assert_allclose(run(made, feed(0)), run(given, feed(0)), atol=1e-6)


def test_empty_mask_is_left_out_and_another_is_not(tmp_path: Path) -> None:
    given, made = tmp_path / "given.onnx", tmp_path / "made.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH.replace(" SCALE", "").replace(" MASK", ", mask")), given)
    model = skip_empty_masks(load(given))
    read = sorted(len(node.inputs) for node in model.graph.all_nodes() if node.op_type == "Attention")
    assert read == [3, 4]
    save(model, made)
    masked = feed(0)
    for inputs in (masked, masked | {"mask": np.zeros_like(masked["mask"])}):
        np.testing.assert_array_equal(run(made, inputs), run(given, inputs))
