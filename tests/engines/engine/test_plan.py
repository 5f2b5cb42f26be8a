"""A plan at work, on a fake TensorRT and CUDA; with the marker `gpu` on real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from cosytriton_engines.engine import builder as engine
from cosytriton_engines.engine import device
from cosytriton_engines.engine.builder import EngineError, build_plan
from cosytriton_engines.engine.plan import PlanRunner
from cosytriton_engines.engine.shapes import Shapes
from cosytriton_engines.engine.sources import source_of
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Feed

if TYPE_CHECKING:
    from tests.engines.conftest import WriteGraph

TINY = 1e-6
LONG: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 16), "max": (4, 4, 64)}}
SHORT: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 2), "max": (4, 4, 4)}}

BuildPlan = Callable[..., Path]


@pytest.fixture
def built(trt: Any, tmp_path: Path) -> BuildPlan:
    """The plan of a graph."""

    def make(graph: Path, *profiles: Shapes) -> Path:
        plan = tmp_path / "flow" / "1" / "model.fp16.plan"
        plan.parent.mkdir(parents=True, exist_ok=True)
        build_plan(graph, profiles or [LONG, SHORT], plan, trt=trt)
        return plan

    return make


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A graph of several types: y = x * 2 in half precision, more = count + 1, loud = y > 1."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"]),
        helper.make_node("Add", ["count", "one"], ["more"]),
        helper.make_node("Greater", ["y", "half"], ["loud"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["batch", "length"]) for n in "xy")
    count, more = (
        helper.make_tensor_value_info(n, TensorProto.INT32, ["batch", 1]) for n in ("count", "more")
    )
    loud = helper.make_tensor_value_info("loud", TensorProto.BOOL, ["batch", "length"])
    constants = [
        helper.make_tensor("one", TensorProto.INT32, [1], [1]),
        helper.make_tensor("half", TensorProto.FLOAT16, [1], [1.0]),
    ]
    graph = helper.make_graph(nodes, "counted", [x, count], [y, more, loud], constants)
    path = tmp_path / "counted.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def ramp(batch: int, length: int) -> Feed:
    shape = (batch, 4, length)
    return {"x": np.linspace(-3, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)}


def test_outputs_come_by_name_whatever_the_size(
    built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    """Buffers grow and are used again: an earlier, longer feed leaves nothing in a later one."""
    with PlanRunner(built(write_graph("Sigmoid", "Sin")), trt=trt, cuda=cuda) as runner:
        for batch, length in ((1, 3), (4, 64), (2, 5)):
            feed = ramp(batch, length)
            outputs = runner.run(feed)
            assert list(outputs) == ["y"]
            np.testing.assert_allclose(outputs["y"], np.sin(1 / (1 + np.exp(-feed["x"]))), atol=TINY)


def test_every_type_keeps_its_values(built: BuildPlan, counted: Path, trt: Any, cuda: Any) -> None:
    shapes: Shapes = {
        "x": {"min": (1, 1), "opt": (1, 2), "max": (2, 8)},
        "count": {"min": (1, 1), "opt": (1, 1), "max": (2, 1)},
    }
    x = np.array([[0.25, 0.75]], np.float16)
    with PlanRunner(built(counted, shapes), trt=trt, cuda=cuda) as runner:
        outputs = runner.run({"x": x, "count": np.array([[7]], np.int32)})
    wanted: Feed = {
        "y": np.array([[0.5, 1.5]], np.float16),
        "more": np.array([[8]], np.int32),
        "loud": np.array([[False, True]]),
    }
    for name, value in wanted.items():
        np.testing.assert_array_equal(outputs[name], value, strict=True)


def test_an_array_of_any_layout_is_read_right(
    built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    transposed = np.arange(12, dtype=np.float32).reshape(1, 3, 4).transpose(0, 2, 1)
    with PlanRunner(built(write_graph("Relu")), trt=trt, cuda=cuda) as runner:
        np.testing.assert_array_equal(runner.run({"x": transposed})["y"], transposed)


@pytest.mark.parametrize(("length", "profile"), [(1, 1), (4, 1), (5, 0), (64, 0)])
def test_the_profile_tuned_for_the_nearest_shape_runs(
    length: int, profile: int, built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    with PlanRunner(built(write_graph("Relu")), trt=trt, cuda=cuda) as runner:
        assert runner.plan.nearest({"x": (2, 4, length)}) == profile
        assert runner.run(ramp(2, length))["y"].shape == (2, 4, length)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, r"given are \[\], inputs are \['x'\]"),
        ({**ramp(1, 3), "z": np.zeros(1)}, r"given are \['x', 'z'\]"),
        ({"x": np.zeros((1, 4, 3))}, "x is float64, the engine takes float32"),
        (
            ramp(1, 65),
            r"x is \(1, 4, 65\), allowed is \(1, 4, 1\) to \(4, 4, 64\) or \(1, 4, 1\) to \(4, 4, 4\)",
        ),
        (ramp(5, 3), r"x is \(5, 4, 3\)"),
        ({"x": np.zeros((4, 3), np.float32)}, r"x is \(4, 3\)"),
    ],
    ids=["missing", "unknown", "type", "long", "batch", "rank"],
)
def test_a_feed_that_does_not_fit_is_refused_and_the_next_one_runs(
    feed: Feed, message: str, built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    with PlanRunner(built(write_graph("Relu")), trt=trt, cuda=cuda) as runner:
        with pytest.raises(EngineError, match=message):
            runner.run(feed)
        assert runner.run(ramp(1, 2))["y"].shape == (1, 4, 2)


@pytest.mark.parametrize(("attribute", "value"), [("GPU", "another GPU"), ("__version__", "10.14")])
def test_a_plan_of_another_machine_is_refused_with_the_command(
    attribute: str, value: str, built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    plan = built(write_graph("Relu"))
    setattr(trt, attribute, value)
    with pytest.raises(
        EngineError, match=r"GPU model and the version .*build --profile gpu_fp16 .*says: made"
    ):
        PlanRunner(plan, trt=trt, cuda=cuda)


@pytest.mark.parametrize("version_compatible", [False, True])
def test_code_of_the_plan_runs_only_where_it_was_built_to(
    version_compatible: bool,
    built: BuildPlan,
    write_graph: WriteGraph,
    trt: Any,
    cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtimes = []
    original = trt.Runtime.__init__

    def created(runtime: Any, logger: Any) -> None:
        original(runtime, logger)
        runtimes.append(runtime)

    monkeypatch.setattr(trt.Runtime, "__init__", created)
    with PlanRunner(
        built(write_graph("Relu")), trt=trt, cuda=cuda, version_compatible=version_compatible
    ) as runner:
        runner.run(ramp(1, 2))
    assert [runtime.engine_host_code_allowed for runtime in runtimes] == [version_compatible]


@pytest.mark.parametrize("content", [None, b""])
def test_a_plan_that_is_empty_or_missing_is_refused(
    content: bytes | None, trt: Any, cuda: Any, tmp_path: Path
) -> None:
    plan = tmp_path / "model.int8.plan"
    if content is not None:
        plan.write_bytes(content)
    with pytest.raises(
        EngineError, match=r"(is empty|is not there)\. Run `cosytriton build --profile gpu_int8"
    ):
        PlanRunner(plan, trt=trt, cuda=cuda)


def test_an_output_whose_shape_depends_on_values_is_refused(
    built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    plan = built(write_graph("NonZero"))
    with (
        PlanRunner(plan, trt=trt, cuda=cuda) as runner,
        pytest.raises(EngineError, match=r"shape \(1, -1\) of the output y depends on values"),
    ):
        runner.run(ramp(1, 2))


def test_an_engine_that_fails_is_no_answer(
    built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PlanRunner(built(write_graph("Relu")), trt=trt, cuda=cuda) as runner:
        monkeypatch.setattr(trt.IExecutionContext, "execute_async_v3", lambda *_: False)
        with pytest.raises(EngineError, match="the engine did not run"):
            runner.run(ramp(1, 2))


def test_memory_that_the_gpu_does_not_have_is_an_error_of_ours(
    built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    with PlanRunner(built(write_graph("Relu")), trt=trt, cuda=cuda) as runner:
        cuda.limit = 256
        assert runner.run(ramp(1, 4))["y"].shape == (1, 4, 4)
        with pytest.raises(EngineError, match="cudaErrorMemoryAllocation"):
            runner.run(ramp(4, 64))
        assert runner.run(ramp(1, 3))["y"].shape == (1, 4, 3)


def differences(plan: Path, graph: Path, feeds: Sequence[Feed], trt: Any, cuda: Any) -> dict[str, float]:
    """The largest difference of each output between a plan and its graph on ONNX Runtime."""
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    found = dict.fromkeys(names, 0.0)
    with PlanRunner(plan, trt=trt, cuda=cuda) as runner:
        for feed in feeds:
            given = runner.run(feed)
            for name, wanted in zip(names, session.run(names, feed), strict=True):
                found[name] = max(found[name], float(np.abs(given[name] - wanted).max()))
    return found


def test_a_plan_agrees_with_its_graph(built: BuildPlan, write_graph: WriteGraph, trt: Any, cuda: Any) -> None:
    graph = write_graph("Sin")
    assert differences(built(graph), graph, [ramp(1, 3), ramp(2, 8)], trt, cuda) == {"y": 0}


def test_an_updated_cache_is_read_where_the_cache_was(
    tiny_repository: Path, trt: Any, cuda: Any, tmp_path: Path
) -> None:
    """A language model without memory of its own: its caches come with the feed."""
    graph = version_directory(tiny_repository, "speech_lm") / FP32_GRAPH
    source = source_of("speech_lm", graph, pipeline_of(COSYVOICE2), tmp_path)
    plan = tmp_path / "model.fp16.plan"
    build_plan(source.graph, source.profiles, plan, trt=trt)
    rng, (_, prompt) = np.random.default_rng(0), source.profiles
    feed: Feed = {name: rng.normal(size=sizes["min"]).astype(np.float32) for name, sizes in prompt.items()}
    feed |= {
        name: np.ones(prompt[name]["min"], np.int32) for name in ("input_ids", "past_counts", "new_counts")
    }
    errors = differences(plan, source.graph, [feed], trt, cuda)
    assert sum("_cache_out" in name for name in errors) == len(feed) - 3
    assert max(errors.values()) < TINY


@pytest.mark.gpu
def test_a_real_gpu_builds_and_runs_a_plan(write_graph: WriteGraph, tmp_path: Path) -> None:
    """Both profiles, against ONNX Runtime."""
    trt = pytest.importorskip("tensorrt", reason="needs a GPU with TensorRT")
    cuda = pytest.importorskip(device.MODULE, reason="needs cuda-python")
    if cuda.cudaGetDeviceCount()[0] != cuda.cudaError_t.cudaSuccess:
        pytest.skip("needs an NVIDIA GPU")
    graph, plan = write_graph("Sigmoid", "Sin"), tmp_path / "model.fp16.plan"
    options = engine.EngineOptions(timing_cache=tmp_path / "timing.cache", workspace_mib=64)
    build_plan(graph, [LONG, SHORT], plan, trt=trt, options=options)
    assert options.timing_cache is not None
    assert options.timing_cache.stat().st_size > 0
    assert differences(plan, graph, [ramp(1, 3), ramp(4, 64)], trt, cuda)["y"] < 1e-3
