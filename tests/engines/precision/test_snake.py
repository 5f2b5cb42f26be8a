"""Snakes of a quantized graph as tables: they give what computing them gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from cosytriton_engines.precision.probe import value_ranges
from cosytriton_engines.precision.quantize import ONNXRUNTIME, observed, quantize
from cosytriton_engines.precision.snake import tabulate_snakes
from cosytriton_engines.precision.surgery import load, save, session
from cosytriton_ensemble.spec import Array, Feed

CHANNELS, FRAMES = 32, 40
RNG = np.random.default_rng(0)
ALPHA = RNG.uniform(0.3, 3, (CHANNELS, 1))
SNAKE = """
        {0}_angle = Mul ({1}, alpha)
        {0}_sine = Sin ({0}_angle)
        {0}_square = Mul ({0}_sine, {0}_sine)
        {0}_wave = Mul ({0}_square, gain)
        {0} = Add ({1}, {0}_wave)"""


@pytest.fixture
def feed() -> Feed:
    """Two rows, the second of which ends before the first; the padding is not zero."""
    mask = np.ones((2, 1, FRAMES), np.float32)
    mask[1, :, 30:] = 0
    return {"x": RNG.normal(0, 1.5, (2, CHANNELS, FRAMES)).astype(np.float32), "mask": mask}


@pytest.fixture(params=[True, False], ids=["of a trunk", "of a convolution alone"])
def snakes(request: pytest.FixtureRequest) -> int:
    """How many snakes the stage has: the first one reads real numbers, the second one integers."""
    return 1 + bool(request.param)


@pytest.fixture
def stage(tmp_path: Path, snakes: int) -> Path:
    """A layer of a residual block: x + conv(snake(conv(snake(x)) * mask)) * mask, of a masked x."""
    first = "first = Identity (trunk)" if snakes == 1 else SNAKE.format("first", "trunk")
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    network (float[n, {CHANNELS}, t] x, float[n, 1, t] mask) => (float[n, {CHANNELS}, t] y)
    {{
        trunk = Mul (x, mask)
        {first}
        conv = Conv <pads = [1, 1]> (first, w1, b1)
        masked = Mul (conv, mask){SNAKE.format("second", "masked")}
        again = Conv <pads = [1, 1]> (second, w2, b2)
        branch = Mul (again, mask)
        y = Add (trunk, branch)
    }}
    """
    shape = (CHANNELS, CHANNELS, 3)
    arrays = {"alpha": ALPHA, "gain": 1 / ALPHA}
    arrays |= {name: RNG.normal(0, 0.1, shape) for name in ("w1", "w2")}
    arrays |= {name: RNG.normal(0, 1, CHANNELS) for name in ("b1", "b2")}
    model = ir.from_onnx_text(text)
    for name, array in arrays.items():
        key = f"{name}.weight" if name in ("w1", "w2") else name
        tensor = ir.tensor(array.astype(np.float32), name=key)
        constant = ir.val(key, const_value=tensor)
        model.graph.register_initializer(constant)
        for node in model.graph:
            node.name = str(node.outputs[0].name)
            for index, value in enumerate(node.inputs):
                if value is not None and value.name == name and value is not constant:
                    node.replace_input_with(index, constant)
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def quantized(stage: Path, feed: Feed) -> ir.Model:
    return quantize(load(stage), value_ranges(stage, [feed], observed), (), ONNXRUNTIME)


def run(model: ir.Model, feed: Feed) -> Array:
    output: Array = session(model).run(None, feed)[0]
    return output


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_gives_what_the_sines_give(stage: Path, feed: Feed, snakes: int, tmp_path: Path) -> None:
    """To the last bit between convolutions; of real numbers, some results are the next of the 256 values."""
    exact, wanted = run(load(stage), feed), run(quantized(stage, feed), feed)
    model = tabulate_snakes(quantized(stage, feed))
    assert operators(model)["GatherElements"] == snakes
    save(model, tmp_path / "tables.onnx")
    given = ort.InferenceSession(tmp_path / "tables.onnx").run(None, feed)[0]
    assert (given - exact).std() < 1.1 * (wanted - exact).std()
    if snakes == 1:
        np.testing.assert_allclose(run(model, feed), wanted, atol=1e-6)


def test_values_beyond_the_table_are_its_last(stage: Path, feed: Feed) -> None:
    model = tabulate_snakes(quantized(stage, feed))
    loud = feed | {"x": feed["x"] * 100}
    np.testing.assert_allclose(
        run(model, loud) - loud["x"] * loud["mask"],
        run(quantized(stage, feed), loud) - loud["x"] * loud["mask"],
        atol=0.1,
    )


def test_a_row_ends_as_it_does_alone(stage: Path, feed: Feed) -> None:
    model = tabulate_snakes(quantized(stage, feed))
    alone = {name: array[1:, :, :30] for name, array in feed.items()}
    assert np.array_equal(run(model, feed)[1:, :, :30], run(model, alone))


def test_what_is_not_quantized_stays(stage: Path) -> None:
    assert operators(tabulate_snakes(load(stage))) == operators(load(stage))
