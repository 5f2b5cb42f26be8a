"""Half precision: which nodes it takes, and that the graph still computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from cosytriton_engines.precision.half import half_names, simulate_half, to_half, with_ancestors
from cosytriton_engines.precision.surgery import load, save
from cosytriton_ensemble.families import COSYVOICE2, COSYVOICE3
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Array

FLOW, LM = pipeline_of(COSYVOICE2).flow, pipeline_of(COSYVOICE2).speech_lm


def network(path: Path, *, floor: float = 0.0) -> Path:
    """y = relu(max(x, floor) @ W + 1) with a Loop that adds y to x three times."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    network (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] layer_weight = {{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}},
     float floor = {{{floor}}}, float one = {{1}}, int64 steps = {{3}}, bool always = {{1}}>
    {{
        floored = Max (x, floor)
        product = MatMul (floored, layer_weight)
        raised = Add (product, one)
        rectified = Relu (raised)
        y = Loop (steps, always, x) <body = body
            (int64 i, bool go, float[n, 4] carried) => (bool on, float[n, 4] sum)
        {{
            on = Identity (go)
            halved = Div (rectified, one)
            sum = Add (carried, halved)
        }}>
    }}
    """
    model = ir.from_onnx_text(text)
    model.graph.initializers["layer_weight"].name = "layer.weight"
    for node in model.graph.all_nodes():
        node.name = node.op_type if node.outputs[0].name != "sum" else "Sum"
    ir.save(model, path)
    return path


def halved(path: Path, keep: Sequence[str] = ()) -> ir.Model:
    model = load(path)
    return to_half(model, half_names(model, keep))


def types(model: ir.Model) -> dict[str, str]:
    return {str(n.name): n.outputs[0].dtype.name for n in model.graph.all_nodes() if n.outputs[0].dtype}


def run(model: ir.Model | Path, x: Sequence[float]) -> Array:
    source = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    output: Array = ort.InferenceSession(source).run(None, {"x": np.array([x], np.float32)})[0]
    return output


def test_layers_and_what_follows_them_are_half(tmp_path: Path) -> None:
    model = halved(network(tmp_path / "model.onnx"))
    found = types(model)
    assert {name for name in ("MatMul", "Add", "Relu", "Div") if found[name] == "FLOAT16"} == {
        "MatMul", "Add", "Relu", "Div",
    }  # fmt: skip


def test_what_stands_before_the_first_layer_stays(tmp_path: Path) -> None:
    """The floor of a log-mel is below the smallest half: log(0) would be infinite."""
    assert types(halved(network(tmp_path / "model.onnx", floor=1e-10)))["Max"] == "FLOAT"


def test_what_a_loop_carries_is_summed_in_full(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    model = halved(path)
    assert types(model)["Sum"] == "FLOAT"
    save(model, tmp_path / "half.onnx")
    x = [1000.25, 0.25, 0.5, 2.0]  # 1000.25 needs more than the 11 bits of a half
    np.testing.assert_allclose(run(tmp_path / "half.onnx", x), run(path, x), rtol=1e-3)
    assert run(tmp_path / "half.onnx", x)[0, 0] % 1 == 0.25


def test_a_named_node_stays(tmp_path: Path) -> None:
    found = types(halved(network(tmp_path / "model.onnx"), ["Relu"]))
    assert found["Relu"] == "FLOAT"
    assert found["Add"] == "FLOAT16"


def test_ancestors_of_a_node(tmp_path: Path) -> None:
    model = load(network(tmp_path / "model.onnx"))
    assert with_ancestors(model, ["Add"]) == {"Add", "MatMul", "Max"}


def test_the_interface_stays_as_it_is(tiny_repository: Path, tmp_path: Path) -> None:
    """Triton's configuration of a stage is that of FP32: only the inside changes."""
    path, target = version_directory(tiny_repository, FLOW.name) / "model.onnx", tmp_path / "half.onnx"
    save(halved(path), target)
    full, half = (ort.InferenceSession(str(p)) for p in (path, target))
    for ours, theirs in ((full.get_inputs(), half.get_inputs()), (full.get_outputs(), half.get_outputs())):
        assert [(v.name, v.type) for v in ours] == [(v.name, v.type) for v in theirs]
    assert target.stat().st_size < 0.6 * path.stat().st_size


@pytest.mark.parametrize("keep", [(), ("llm.model.model.layers.1.self_attn/Softmax",)], ids=["all", "kept"])
def test_caches_of_the_language_model_are_half(
    keep: tuple[str, ...], tiny_repository: Path, tmp_path: Path
) -> None:
    """Also where a layer that reads them is kept, and with it all that feeds it."""
    model = load(version_directory(tiny_repository, LM.name) / "model.onnx")
    keep = tuple(with_ancestors(model, keep))
    caches = [str(value.name) for value in model.graph.inputs if "_cache." in str(value.name)]
    save(to_half(model, half_names(model, keep), caches), tmp_path / "half.onnx")
    session = ort.InferenceSession(str(tmp_path / "half.onnx"))
    for value in (*session.get_inputs(), *session.get_outputs()):
        assert (value.type == "tensor(float16)") == ("_cache" in value.name), value.name


def test_no_double_is_left(repositories: object, tmp_path: Path) -> None:
    """The pitch of CosyVoice 3 is computed in FP64, which TensorRT does not have."""
    repository = repositories(COSYVOICE3)  # type: ignore[operator]
    path = version_directory(repository, pipeline_of(COSYVOICE3).vocoder.name) / "model.onnx"
    model = load(path)
    assert "DOUBLE" in types(model).values()
    save(to_half(model, half_names(model)), tmp_path / "half.onnx")
    assert "DOUBLE" not in types(load(tmp_path / "half.onnx")).values()
    ort.InferenceSession(str(tmp_path / "half.onnx"))


@pytest.mark.parametrize("value", [1e6, -1e9])
def test_a_constant_that_is_too_large_becomes_the_largest_half(value: float, tmp_path: Path) -> None:
    """An infinite mask would make NaN of a row that is masked whole."""
    model = load(network(tmp_path / "model.onnx"))
    model.graph.initializers["one"].const_value = ir.tensor(np.array(value, np.float32), name="one")
    to_half(model, half_names(model))
    halves = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT16]
    largest = max(np.abs(v.const_value.numpy().astype(np.float64)).max() for v in halves if v.const_value)
    assert largest == 65504


def test_a_node_whose_scalar_would_vanish_stays(tmp_path: Path) -> None:
    model = load(network(tmp_path / "model.onnx"))
    model.graph.initializers["one"].const_value = ir.tensor(np.array(1e-9, np.float32), name="one")
    found = types(to_half(model, half_names(model)))
    assert found["Add"] == "FLOAT"
    assert found["Relu"] == "FLOAT16"


def test_a_graph_whose_weights_lie_beside_it_is_written_whole(tmp_path: Path) -> None:
    """Those of a full-size language model do; half of them fit into the graph's own file."""
    (tmp_path / "large").mkdir()
    path = network(tmp_path / "model.onnx")
    ir.save(
        ir.load(path),
        tmp_path / "large" / "model.onnx",
        external_data="model.onnx.data",
        size_threshold_bytes=0,
    )
    save(ir.load(tmp_path / "large" / "model.onnx"), tmp_path / "again.onnx")
    x = [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_array_equal(run(tmp_path / "again.onnx", x), run(path, x))


def test_the_judged_twin_overflows_where_half_precision_does(tmp_path: Path) -> None:
    """ONNX Runtime computes the typed graph in FP32 on a CPU, and would let it pass."""
    model = load(network(tmp_path / "model.onnx"))
    x = [60_000.0, 0.0, 0.0, 0.0]
    model.graph.initializers["one"].const_value = ir.tensor(np.array(30_000, np.float32), name="one")
    save(simulate_half(model, half_names(model)), tmp_path / "twin.onnx")
    assert np.isinf(run(tmp_path / "twin.onnx", x)).any()


def test_the_judged_twin_rounds_to_eleven_bits(tmp_path: Path) -> None:
    path, rng = network(tmp_path / "model.onnx"), np.random.default_rng(0)
    model = load(path)
    save(simulate_half(model, half_names(model)), tmp_path / "twin.onnx")
    x = rng.uniform(1, 2, 4).tolist()
    error = run(tmp_path / "twin.onnx", x) / run(path, x) - 1
    assert 1e-6 < np.abs(error).max() < 2**-10


def test_a_twin_of_nothing_is_the_graph(tmp_path: Path) -> None:
    path = network(tmp_path / "model.onnx")
    save(simulate_half(load(path), ()), tmp_path / "twin.onnx")
    x = [1.1, 2.2, 3.3, 4.4]
    np.testing.assert_array_equal(run(tmp_path / "twin.onnx", x), run(path, x))
