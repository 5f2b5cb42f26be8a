"""The gate: TensorRT for RTX parses a graph and builds an engine without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cosytriton_engines.engine import gate
from cosytriton_engines.engine.builder import BuildResult, EngineError
from cosytriton_engines.engine.gate import build_gate, measured
from cosytriton_engines.engine.shapes import Shapes
from cosytriton_engines.engine.sources import TEXT_ENCODER, source_of
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import FP16_GRAPH, FP32_GRAPH, QDQ_GRAPH, text_encoder_of
from cosytriton_ensemble.repository import version_directory

if TYPE_CHECKING:
    from tests.engines.conftest import WriteGraph

PIPELINE = pipeline_of(COSYVOICE2)
LANGUAGE_MODEL = PIPELINE.speech_lm.name
GRAPHS = [*(stage.name for stage in PIPELINE.native_stages), LANGUAGE_MODEL]
UNLEARNED = [stage.name for stage in PIPELINE.native_stages if not stage.learned]  # served in FP32
PROFILE: Shapes = {"x": {"min": (1, 4, 1), "opt": (2, 4, 1), "max": (8, 4, 1)}}


def graph_of(repository: Path, model: str, file: str = FP32_GRAPH) -> Path:
    """Where a graph lies; the text encoder's beside the language model's, which it belongs to."""
    if model == TEXT_ENCODER:
        return version_directory(repository, LANGUAGE_MODEL) / text_encoder_of(file)
    return version_directory(repository, model) / file


def built(model: str, graph: Path, family: Family, folder: Path) -> BuildResult:
    source = source_of(model, graph, pipeline_of(family), folder)
    return build_gate(source.graph, source.profiles)


def test_missing_tensorrt_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MODULE", "tensorrt_that_is_not_there")
    with pytest.raises(EngineError, match=r"pip install tensorrt-rtx-cu12=="):
        build_gate(tmp_path / "model.onnx", [PROFILE])


def test_a_build_that_kills_its_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "build_gate", _die)
    with pytest.raises(EngineError, match=r"model\.onnx: the process that built it died"):
        measured(tmp_path / "model.onnx", [PROFILE])


def _die(_graph: Path, _profiles: Sequence[Shapes]) -> None:
    os._exit(1)


def test_a_model_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match="no graph of a model 'tts'; known are speaker_embedding, .*vocoder"
    ):
        source_of("tts", tmp_path / DEFAULT_MODEL, PIPELINE, tmp_path)


@pytest.mark.gate
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("model", UNLEARNED)
def test_every_exported_graph_builds(
    model: str, family: Family, repositories: Callable[[Family], Path], tmp_path: Path
) -> None:
    """Strongly typed, over the whole range of sizes that is served."""
    assert built(model, graph_of(repositories(family), model), family, tmp_path).plan_bytes > 0


@pytest.mark.gate
@pytest.mark.parametrize("file", [FP16_GRAPH, QDQ_GRAPH], ids=["fp16", "int8"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("model", [*GRAPHS, TEXT_ENCODER])
def test_every_variant_builds(
    model: str, family: Family, file: str, variants: Callable[[Family], Path], tmp_path: Path
) -> None:
    """Those of a repository with all graphs; a stage that learned nothing stays FP32."""
    graph = graph_of(variants(family), model, file)
    learned = {stage.name: stage.learned for stage in pipeline_of(family).native_stages}
    if not learned.get(model, True) or (model == TEXT_ENCODER and family is not COSYVOICE1):
        assert not graph.exists()
        return
    assert built(model, graph, family, tmp_path).plan_bytes > 0


@pytest.mark.gate
def test_text_encoder_builds(repositories: Callable[[Family], Path], tmp_path: Path) -> None:
    graph = graph_of(repositories(COSYVOICE1), TEXT_ENCODER)
    assert built(TEXT_ENCODER, graph, COSYVOICE1, tmp_path).plan_bytes > 0


@pytest.mark.gate
def test_cache_of_open_length_is_refused(tiny_repository: Path, tmp_path: Path) -> None:
    """Why the language model's graph is not built as it is exported."""
    exported = graph_of(tiny_repository, LANGUAGE_MODEL)
    source = source_of(LANGUAGE_MODEL, exported, PIPELINE, tmp_path)
    with pytest.raises(EngineError, match=r"(?s)TensorScatter .*KV cache tensor must have a static sequence"):
        build_gate(exported, source.profiles)


@pytest.mark.gate
def test_refused_operators_are_named_with_the_reason(write_graph: WriteGraph) -> None:
    graph = write_graph("DFT", "Relu", "DFT", axis=1)
    refused = r"DFT 'node_%d': INVALID_NODE, .*Plugin not found"
    with pytest.raises(EngineError, match=f"{refused % 0}.*; {refused % 2}"):
        build_gate(graph, [PROFILE])


@pytest.mark.gate
def test_profile_must_name_the_inputs(write_graph: WriteGraph) -> None:
    with pytest.raises(EngineError, match=r"inputs are \['x'\], the profile's are \['z'\]"):
        build_gate(write_graph("Relu"), [{"z": PROFILE["x"]}])


@pytest.mark.gate
def test_a_profile_out_of_order_is_refused_in_the_words_of_tensorrt(write_graph: WriteGraph) -> None:
    sizes = {**PROFILE["x"], "min": (3, 4, 1)}
    with pytest.raises(EngineError, match="profiles satisfy MIN<=OPT<=MAX"):
        build_gate(write_graph("Relu"), [PROFILE, {"x": sizes}])


@pytest.mark.gate
def test_a_build_is_measured_in_a_process_of_its_own(write_graph: WriteGraph) -> None:
    graph = write_graph("Relu")
    result = measured(graph, [PROFILE])
    assert result.plan_bytes > 0
    assert 50 < result.peak_mib < 2000  # the library alone has 100
    with pytest.raises(EngineError, match="DFT 'node_0'"):
        measured(write_graph("DFT", axis=1), [PROFILE])
