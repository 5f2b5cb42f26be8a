"""Parity: what counts as equal, what a refusal names, which sizes are compared, and the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cosytriton_ensemble.pipeline import PIPELINES
from cosytriton_ensemble.spec import Array, Dim, Feed, Size, Stage
from cosytriton_export.errors import ExportError
from cosytriton_export.parity import SIZES, ParityRow, format_table, measure, stage_feeds

TOLERANCE = 1e-4
STAGES = {f"{name}, {s.name}": s for name, p in PIPELINES.items() for s in p.native_stages}
VALUES = (("mel", TensorProto.FLOAT, 4), ("ids", TensorProto.INT32, "n"), ("count", TensorProto.INT32, 1))
LIMITS: dict[str, dict[str, int]] = {"tokens": {"opt": 25, "max": 50}, "frames": {"opt": 90, "max": 180}}
Change = Callable[[Array, Array, Array], tuple[Array, ...]]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph that gives its inputs back."""
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    inputs, outputs = (
        [helper.make_tensor_value_info(f"{p}{name}", kind, ["batch", size]) for name, kind, size in VALUES]
        for p in ("given_", "")
    )
    nodes = [helper.make_node("Identity", [f"given_{name}"], [name]) for name, *_ in VALUES]
    graph = helper.make_graph(nodes, "identity", inputs, outputs)
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def compare(graph: Path, change: Change, rows: int = 3) -> float:
    """Measure the graph against one that gives something else; the error that is accepted."""
    rng = np.random.default_rng(0)
    mel = rng.uniform(-1, 1, (rows, 4)).astype(np.float32)
    ids = rng.integers(0, 9, (rows, 2000)).astype(np.int32)
    count = np.full((rows, 1), 7, np.int32)

    def reference(feed: Feed) -> tuple[Array, ...]:
        return change(*(feed[f"given_{name}"].copy() for name, *_ in VALUES))

    feed = {"given_mel": mel, "given_ids": ids, "given_count": count}
    (error,) = measure(graph, reference, {("opt", rows): feed}, TOLERANCE).values()
    return error


def add(array: Array, number: float, places: int | None = None) -> Array:
    array.reshape(-1)[:places] += array.dtype.type(number)
    return array


def test_equal_outputs_have_no_error(graph: Path) -> None:
    assert compare(graph, lambda *outputs: outputs) == 0


def test_a_small_error_is_measured(graph: Path) -> None:
    assert compare(graph, lambda m, i, c: (add(m, 5e-5), i, c)) == pytest.approx(5e-5, rel=0.01)


def test_an_error_counts_by_the_largest_magnitude(graph: Path) -> None:
    big = np.array([[1000, 0, 0, 0]], np.float32)
    feed = {
        "given_mel": big,
        "given_ids": np.zeros((1, 2), np.int32),
        "given_count": np.ones((1, 1), np.int32),
    }

    def reference(given: Feed) -> tuple[Array, ...]:
        return given["given_mel"] + np.float32(0.05), given["given_ids"], given["given_count"]

    (error,) = measure(graph, reference, {("opt", 1): feed}, TOLERANCE).values()
    assert error == pytest.approx(5e-5, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, i, c: (add(m, 0.01), i, c), r"'mel' at size 'opt' with 3 rows differs .* 1\.00e-02"),
        (lambda m, i, c: (add(m, np.nan, 1), i, c), "'mel' .* is not finite. The weights are damaged"),
        (lambda m, i, c: (m[:, :-1], i, c), r"'mel' .* is float32 \[3, 4\], PyTorch gives float32 \[3, 3\]"),
        (lambda m, i, c: (m.astype("f8"), i, c), r"PyTorch gives float64 \[3, 4\]"),
        (lambda m, i, c: (m, add(i, 1, 60), c), "'ids' .* by 1.00e-02, allowed is 1e-03"),
    ],
)
def test_a_difference_is_named(graph: Path, change: Change, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        compare(graph, change)


def test_one_id_of_a_thousand_may_lie_on_the_edge_of_rounding(graph: Path) -> None:
    assert compare(graph, lambda m, i, c: (m, add(i, 1, 6), c)) == 6 / 6000


def test_no_count_may_be_wrong(graph: Path) -> None:
    """Not even in one row of very many."""
    with pytest.raises(ExportError, match="output 'count' at size 'opt' with 2000 rows differs"):
        compare(graph, lambda m, i, c: (m, i, add(c, 1, 1)), rows=2000)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match="ONNX Runtime refuses the graph"):
        measure(tmp_path / "model.onnx", lambda _: [], {}, 0)


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_feeds_have_every_size_that_can_be_afforded(stage: Stage) -> None:
    """Attention over a minute of speech would take minutes; a few seconds stand for it."""
    feeds = stage_feeds(stage)
    assert set(feeds) == {(size, rows) for size in SIZES for rows in (1, 3)}
    for (size, rows), feed in feeds.items():
        for tensor in stage.inputs:
            dims = zip(tensor.dims, tensor.shape(size), strict=True)
            most = tuple(affordable(size, *dim) for dim in dims)
            shape = feed[tensor.name].shape
            assert len(shape) == 1 + len(most)
            assert all(0 < extent <= limit for extent, limit in zip(shape, (rows, *most), strict=True))
            assert most != tensor.shape(size) or shape == (rows, *most)


def affordable(size: Size, dim: int | Dim, declared: int) -> int:
    """How long an input may be at most."""
    if not isinstance(dim, Dim):
        return declared
    limits = next((limits for unit, limits in LIMITS.items() if dim.name.endswith(unit)), {})
    return min(declared, limits.get(size, declared))


def test_the_table_shows_errors_and_that_weights_are_untrained() -> None:
    errors: dict[tuple[Size, int], float] = {(size, batch): 1e-6 for size in SIZES for batch in (1, 3)}
    rows = [ParityRow("flow", 18, 2.5, 1e-4, errors), ParityRow("text_frontend", None, 0.1, 0, {})]
    table = format_table(rows, untrained=True)
    assert "| flow          | 18    | 2.5 | 1.0e-06 / 1.0e-06 |" in table
    assert table.endswith("untrained: its sound is noise")
    assert "untrained" not in format_table(rows, untrained=False)
