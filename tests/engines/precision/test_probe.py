"""Measurements inside a graph: ranges of values, and the noise of single layers, in loops too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from cosytriton_engines.precision.half import rounded
from cosytriton_engines.precision.probe import layer_noise, value_ranges
from cosytriton_ensemble.spec import Array

STEPS = 3


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    """y = x W 2^STEPS, where a Loop doubles."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    network (float[n, 2] x) => (float[n, 2] y)
    <float[2, 2] weight = {1, 0, 0, 1}, float two = {2}, int64 steps = {3}, bool always = {1}>
    {
        product = MatMul (x, weight)
        y = Loop (steps, always, product) <body = body
            (int64 i, bool go, float[n, 2] z) => (bool on, float[n, 2] twice)
        {
            on = Identity (go)
            doubled = Mul (z, two)
            twice = Identity (doubled)
        }>
    }
    """
    model = ir.from_onnx_text(text)
    model.graph.initializers["weight"].name = "layer.weight"
    for node in model.graph.all_nodes():
        node.name = str(node.outputs[0].name)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    return path


def named(*names: str) -> object:
    return lambda model: [v for n in model.graph.all_nodes() for v in n.outputs if v.name in names]


def products(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if node.name in ("product", "doubled")]


def feeds(*rows: tuple[float, float]) -> list[dict[str, Array]]:
    return [{"x": np.array([row], np.float32)} for row in rows]


def test_ranges_are_those_of_all_feeds_and_all_steps_of_a_loop(doubling: Path) -> None:
    found = value_ranges(doubling, feeds((1, -1), (3, 0.5)), named("product", "doubled"))  # type: ignore[arg-type]
    assert found == {"product": (-1, 3), "doubled": (-8, 24)}


def test_noise_of_half_precision_is_that_of_its_mantissa(doubling: Path) -> None:
    rng = np.random.default_rng(0)
    many = [{"x": rng.uniform(1, 2, (4096, 2)).astype(np.float32)}]
    noise = layer_noise(doubling, many, products, lambda _: rounded, rounded)
    # 11 bits: a rounding error that is uniform within half a step of 2^-10, over numbers between 1 and 2.
    expected = (2**-10) ** 2 / 12 / (7 / 3)
    assert noise["product"] == pytest.approx(expected, rel=0.05)


def test_what_overflows_is_infinitely_noisy(doubling: Path) -> None:
    noise = layer_noise(doubling, feeds((10_000, 1)), products, lambda _: rounded, rounded)
    assert np.isfinite(noise["product"])
    assert np.isinf(noise["doubled"]), "80,000 is no half"


def test_a_mask_of_minus_infinity_is_no_overflow(doubling: Path) -> None:
    noise = layer_noise(doubling, feeds((-np.inf, 1)), products, lambda _: rounded, rounded)
    assert noise["doubled"] == 0


def test_nothing_to_measure(doubling: Path) -> None:
    assert value_ranges(doubling, feeds((1, 1)), lambda _: []) == {}
    assert layer_noise(doubling, feeds((1, 1)), lambda _: [], lambda _: rounded) == {}
