"""The variants of a graph: quality from feeds, and the layers that a planted outlier makes worth keeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from cosytriton_engines.precision.search import Journal
from cosytriton_engines.precision.surgery import insert, is_layer, layers, load, save, type_of
from cosytriton_engines.precision.variant import Variant, Variants
from cosytriton_engines.quality.evaluate import passes
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU_INT8, GPU_FP16, GPU_INT8, Profile
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Feed

STAGE = pipeline_of(COSYVOICE2).speaker_embedding
LAYER = "campplus.xvector.dense.linear/Conv"
OUTLIER = 1000.0  # times its usual size


@dataclass
class RandomFeeds:
    """Stands for a calibration set."""

    def calibrating(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        assert model == STAGE.name
        return (STAGE.sample("min", 2, seed=seed) for seed in range(min(limit or 4, 4)))

    def judging(self, model: str, limit: int | None = None) -> Iterator[Feed]:
        assert model == STAGE.name
        return (STAGE.sample("min", 2, seed=seed) for seed in range(10, 10 + min(limit or 3, 3)))


def variant_of(path: Path, profile: Profile, folder: Path, lines: list[str] | None = None) -> Variant:
    journal = Journal(folder / "journal.json", {})
    progress = lines.append if lines is not None else lambda _line: None
    return Variants(STAGE.name, path, RandomFeeds(), journal, progress).make(profile)


@pytest.fixture(scope="module")
def graph(tiny_repository: Path) -> Path:
    return version_directory(tiny_repository, STAGE.name) / "model.onnx"


@pytest.fixture(scope="module")
def with_outlier(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same function, but one channel that a layer reads is huge and its weight tiny."""
    model = load(graph)
    node = layers(model)[LAYER]
    activation, weight = node.inputs[0], node.inputs[1]
    assert activation is not None
    assert weight is not None
    assert weight.const_value is not None
    scale = np.ones((1, weight.const_value.numpy().shape[1], 1), np.float32)
    scale[0, 5] = OUTLIER
    factor = ir.val("outlier", const_value=ir.tensor(scale, name="outlier"))
    model.graph.register_initializer(factor)
    node.replace_input_with(0, insert(activation, "Mul", [activation, factor], type_of(activation)))
    weight.const_value = ir.tensor(weight.const_value.numpy() / scale, name=weight.name)
    path = tmp_path_factory.mktemp("outlier") / "model.onnx"
    save(model, path)
    return path


@pytest.mark.parametrize("profile", [CPU_INT8, GPU_FP16, GPU_INT8], ids=lambda profile: profile.name)
def test_a_sound_stage_keeps_nothing(profile: Profile, graph: Path, tmp_path: Path) -> None:
    found = variant_of(graph, profile, tmp_path)
    assert not found.outcome.kept
    assert passes(STAGE.name, profile.precision, found.figures)


@pytest.mark.parametrize("profile", [CPU_INT8, GPU_INT8], ids=lambda profile: profile.name)
def test_the_layer_with_the_outlier_is_found(profile: Profile, with_outlier: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    found = variant_of(with_outlier, profile, tmp_path, lines)
    assert not found.outcome.trials[0].passed, "without the search the stage fails"
    assert found.outcome.kept == (LAYER,)
    assert found.kept[LAYER].startswith("costs most")
    assert passes(STAGE.name, "int8", found.figures)
    assert any(LAYER in line for line in lines), "progress names what is being tried"
    (node,) = (node for node in found.model.graph.all_nodes() if node.name == LAYER)
    assert not [value for value in node.inputs if value is not None and "int8" in str(value.name)]


def test_a_stopped_search_does_nothing_twice(with_outlier: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    variant_of(with_outlier, CPU_INT8, tmp_path)
    again = variant_of(with_outlier, CPU_INT8, tmp_path, lines)
    assert again.outcome.kept == (LAYER,)
    assert not [line for line in lines if "alone" in line], "every single layer is in the journal"


def test_what_overflows_in_half_precision_is_kept_and_named(graph: Path, tmp_path: Path) -> None:
    model = load(graph)
    node = layers(model)[LAYER]
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1e6), name=weight.name)
    output = node.outputs[0]
    uses = list(output.uses())
    factor = ir.val("back", const_value=ir.tensor(np.float32(1e-6), name="back"))
    model.graph.register_initializer(factor)
    back = insert(output, "Mul", [output, factor], type_of(output))
    for use in uses:
        use.node.replace_input_with(use.idx, back)
    path = tmp_path / "model.onnx"
    save(model, path)
    found = variant_of(path, GPU_FP16, tmp_path)
    assert found.kept[LAYER] == "overflows in half precision"
    assert passes(STAGE.name, "fp16", found.figures)


class Prompts:
    """Stands for the prompts of a calibration set."""

    def __init__(self, graph: Path) -> None:
        session = ort.InferenceSession(graph)
        shapes = {value.name: value.shape for value in session.get_inputs() if "_cache." in value.name}
        self.caches: Feed = {
            name: np.zeros((2, heads, 64, width), np.float32) for name, (_, heads, _, width) in shapes.items()
        }

    def calibrating(self, model: str, limit: int | None = None) -> Iterator[Feed]:  # noqa: ARG002
        yield self.feed(0)

    def judging(self, model: str, limit: int | None = None) -> Iterator[Feed]:  # noqa: ARG002
        yield self.feed(1)

    def feed(self, seed: int) -> Feed:
        ids = np.random.default_rng(seed).integers(0, 300, (2, 20)).astype(np.int32)
        counts = {"past_counts": np.zeros(2, np.int32), "new_counts": np.array([20, 7], np.int32)}
        return {"input_ids": ids, **counts, **self.caches}


def test_what_a_language_model_keeps_reads_16_bits(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = version_directory(tiny_repository, "speech_lm") / "model.onnx"
    verdicts = iter([False, True])  # without any layer kept, and with one
    monkeypatch.setattr("cosytriton_engines.precision.variant.passes", lambda *_: next(verdicts))
    journal = Journal(tmp_path / "journal.json", {})
    found = Variants("speech_lm", path, Prompts(path), journal, lambda _line: None).make(CPU_INT8)
    assert len(found.outcome.kept) == 1
    save(found.model, tmp_path / "model.onnx")  # without what nobody uses any more
    nodes = load(tmp_path / "model.onnx").graph
    assert not any(is_layer(node) for node in nodes), "a product is still in FP32"
    (rest,) = (node for node in nodes if node.op_type == "Sub" and ".rest" in str(node.outputs[0].name))
    assert rest.outputs[0].name == f"{found.outcome.kept[0]}.rest"
    assert "GroupQueryAttention" in {node.op_type for node in nodes}
    without, with_one = (trial.figures["divergence"] for trial in found.outcome.trials)
    assert with_one < without < 0.05
