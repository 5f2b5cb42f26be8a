"""A graph runs on the device that was asked for, and what is no graph is opened by whoever knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, save

from cosytriton_ensemble import language_model
from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.language_model import OPENERS, open_decoder
from cosytriton_ensemble.names import THREADS_VARIABLE
from cosytriton_ensemble.onnx_session import open_session


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """y = -x."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    negative = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negative", [x], [y])
    model = helper.make_model(negative, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_graph_runs_on_the_cpu(graph: Path) -> None:
    (y,) = open_session(graph, ort.SessionOptions()).run(["y"], {"x": np.ones(2, np.float32)})
    assert y.tolist() == [-1, -1]


@pytest.mark.parametrize(("wanted", "given"), [(0, 3), (1, 1)])
def test_a_deployment_says_how_many_threads_a_graph_has(
    graph: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, given: int
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "3")
    options = ort.SessionOptions()
    options.intra_op_num_threads = wanted
    assert open_session(graph, options).get_session_options().intra_op_num_threads == given


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_graph_that_cannot_run_on_a_gpu_does_not_run_at_all(graph: Path) -> None:
    """Left alone, ONNX Runtime takes the CPU where its CUDA provider does not load."""
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime may have a GPU")
    with pytest.raises(
        ServerError, match=r"loaded CPUExecutionProvider alone.*onnxruntime-gpu.*--profile cpu"
    ):
        open_session(graph, ort.SessionOptions(), "cuda")


def test_onnxruntime_does_not_run_plans(graph: Path) -> None:
    with pytest.raises(ServerError, match="'tensorrt'; it knows cpu, cuda"):
        open_session(graph, ort.SessionOptions(), "tensorrt")


def test_a_plan_is_opened_by_the_package_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, dict[str, int]]] = []

    class Opener:
        """An entry point."""

        def load(self) -> Any:
            return self.open

        def open(self, path: Path, **options: int) -> str:
            opened.append((path, options))
            return "the decoder"

    def entry_points(group: str, name: str) -> list[Opener]:
        return [Opener()] if (group, name) == (OPENERS, "plan") else []

    monkeypatch.setattr(language_model, "entry_points", entry_points)
    options: dict[str, Any] = {"device": "tensorrt", "threads": 1, "rows": 2, "max_positions": 64}
    decoder: Any = open_decoder(Path("model.fp16.plan"), **options)
    assert decoder == "the decoder"
    assert opened == [(Path("model.fp16.plan"), {"rows": 2, "max_positions": 64})]
    with pytest.raises(ServerError, match=r"opens the language model model\.other: .* entry point 'other'"):
        open_decoder(Path("model.other"), **options)
