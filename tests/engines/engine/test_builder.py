"""Building a plan, with a fake TensorRT; `make gate` builds with a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cosytriton_engines.engine import builder as engine
from cosytriton_engines.engine.builder import EngineError, EngineOptions, build, build_plan
from cosytriton_engines.engine.shapes import Shapes

if TYPE_CHECKING:
    from tests.engines.conftest import WriteGraph

SHORT: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 2), "max": (8, 4, 4)}}
LONG: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 16), "max": (8, 4, 64)}}


def test_a_plan_is_written_with_every_profile(trt: Any, write_graph: WriteGraph, tmp_path: Path) -> None:
    plan = tmp_path / "model.fp16.plan"
    result = build_plan(write_graph("Relu"), [LONG, SHORT], plan, trt=trt)
    assert result.plan_bytes == plan.stat().st_size > 0
    assert min(result.parse_seconds, result.build_seconds) > 0
    opened = trt.Runtime(engine.error_logger(trt)).deserialize_cuda_engine(plan.read_bytes())
    shapes = [opened.get_tensor_profile_shape("x", index)[1] for index in range(2)]
    assert shapes == [[2, 4, 16], [2, 4, 2]]


def test_whoever_reads_the_former_plan_meanwhile_has_it_whole(
    trt: Any, write_graph: WriteGraph, tmp_path: Path
) -> None:
    plan = tmp_path / "model.fp16.plan"
    plan.write_bytes(b"former")
    with plan.open("rb") as reader:
        build_plan(write_graph("Relu"), [LONG], plan, trt=trt)
        assert reader.read() == b"former"
    assert plan.read_bytes() != b"former"


def test_a_failed_build_leaves_the_plan_that_was_there(
    trt: Any, write_graph: WriteGraph, tmp_path: Path
) -> None:
    plan = tmp_path / "model.fp16.plan"
    plan.write_bytes(b"good")
    for memory in (None, trt.IHostMemory(b"")):
        trt.Builder.fails, trt.Builder.memory = True, memory
        with pytest.raises(EngineError, match=r"no engine can be built\. TensorRT says: out of kernels"):
            build_plan(write_graph("Relu"), [LONG], plan, trt=trt)
    assert plan.read_bytes() == b"good"
    assert [file.name for file in tmp_path.iterdir() if "plan" in file.name] == [plan.name]


def test_a_plan_that_cannot_be_written_whole_is_not_written(
    trt: Any, write_graph: WriteGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(_descriptor: int) -> None:
        raise OSError("No space left on device")

    plan = tmp_path / "model.fp16.plan"
    plan.write_bytes(b"good")
    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        build_plan(write_graph("Relu"), [LONG], plan, trt=trt)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*plan*")} == {plan.name: b"good"}


def test_every_refused_node_is_named_with_its_reason(trt: Any, write_graph: WriteGraph) -> None:
    reason = "INVALID_NODE, not known"
    with pytest.raises(EngineError, match=f"DFT 'node_1': {reason}; DFT 'node_3': {reason}$"):
        build(write_graph("Relu", "DFT", "Abs", "DFT"), [LONG], trt=trt)


def test_a_file_that_is_no_graph_is_refused_in_the_words_of_the_parser(trt: Any, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    for content in (None, b"no graph"):
        if content:
            graph.write_bytes(content)
        with pytest.raises(EngineError, match=r"model\.onnx: the parser refuses TensorRT says: cannot read"):
            build(graph, [LONG], trt=trt)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"z": LONG["x"]}, r"the graph's inputs are \['x'\], the profile's are \['z'\]"),
        ({"x": {**LONG["x"], "min": (3, 4, 1)}}, r"cannot be\. TensorRT says: MIN<=OPT<=MAX does not hold"),
    ],
    ids=["names", "order"],
)
def test_a_profile_that_does_not_fit_is_refused(
    profile: Shapes, message: str, trt: Any, write_graph: WriteGraph
) -> None:
    with pytest.raises(EngineError, match=message):
        build(write_graph("Relu"), [LONG, profile], trt=trt)


def test_options_reach_the_builder(trt: Any, write_graph: WriteGraph) -> None:
    graph = write_graph("Relu")
    build(graph, [LONG], trt=trt)
    assert trt.Builder.settings == {}
    build(graph, [LONG], trt=trt, options=EngineOptions(workspace_mib=2, version_compatible=True))
    assert trt.Builder.settings == {"WORKSPACE": 2 * 1024 * 1024, "VERSION_COMPATIBLE": 1}


@pytest.mark.parametrize("before", [None, b"damaged", b"other GPU", b"times"])
def test_the_timing_cache_goes_on_unless_it_does_not_fit(
    before: bytes | None, trt: Any, write_graph: WriteGraph, tmp_path: Path
) -> None:
    cache = tmp_path / "timing.cache"
    if before is not None:
        cache.write_bytes(before)
    for _ in range(2):
        build(write_graph("Relu"), [LONG], trt=trt, options=EngineOptions(timing_cache=cache))
    assert cache.read_bytes() == (b"times++" if before == b"times" else b"++")


def test_progress_is_a_line_for_each_phase_however_often_it_comes(trt: Any, write_graph: WriteGraph) -> None:
    lines: list[str] = []
    build(write_graph("Relu"), [LONG, SHORT], trt=trt, progress=lines.append)
    assert lines == ["TensorRT: Building", "TensorRT: Timing"]


def test_a_tensorrt_that_knows_no_weak_typing_needs_no_flag(
    trt: Any, write_graph: WriteGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, flags = trt.INetworkDefinition(2), []

    def create_network(_builder: Any, given: int) -> Any:
        flags.append(given)
        return network

    monkeypatch.setattr(trt, "NetworkDefinitionCreationFlag", object())
    monkeypatch.setattr(trt.Builder, "create_network", create_network)
    build(write_graph("Relu"), [LONG], trt=trt)
    assert flags == [0]


def test_missing_tensorrt_says_where_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MODULE", "tensorrt_that_is_not_there")
    with pytest.raises(EngineError, match="tensorrt_that_is_not_there cannot be imported .*container"):
        engine.tensorrt()


def test_peak_memory_is_what_the_process_itself_has_touched() -> None:
    """A large parent has no part in it, nor has memory that was only reserved."""
    size = 300 * engine.MIB
    ballast = np.ones(size, np.uint8)
    code = f"""
import numpy as np
from cosytriton_engines.engine.builder import peak_mib
print(peak_mib())
reserved = np.empty({4 * size}, np.uint8)
touched = np.ones({size}, np.uint8)
del reserved, touched
print(peak_mib())
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, child.stdout.split())
    assert 5 < before < len(ballast) / engine.MIB
    assert 5 < after - before - size / engine.MIB + 50 < 100
