"""The language model's engine with its caches on the device, against ONNX Runtime with caches on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import pytest

from cosytriton_engines.engine import language_model_plan
from cosytriton_engines.engine.builder import EngineError, build_plan
from cosytriton_engines.engine.language_model_plan import LanguageModelPlan, open_plan
from cosytriton_engines.engine.sources import source_of
from cosytriton_engines.precision.half import half_names, to_half
from cosytriton_ensemble.config import DEFAULT_MODEL
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.generation import SPEAKER_WIDTH, SpeechRequest
from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.llm_spec import EMBEDDED, Prompt
from cosytriton_ensemble.manifest import Manifest, sha256
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import text_encoder_of
from cosytriton_ensemble.repository import version_directory

if TYPE_CHECKING:
    from tests.engines.conftest import WriteGraph

ROWS = 8
HALF = 2e-2  # largest difference over the largest logit, of half precision
LOGITS = 1e-5  # largest difference; the order of sums depends on the length of the cache


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture
def graph(repositories: Callable[[Family], Path], family: Family) -> Path:
    return version_directory(repositories(family), "speech_lm") / DEFAULT_MODEL


@pytest.fixture
def plan(graph: Path, family: Family, trt: Any, tmp_path: Path) -> Path:
    return plan_of(graph, family, trt, tmp_path)


def plan_of(graph: Path, family: Family, trt: Any, folder: Path) -> Path:
    source = source_of("speech_lm", graph, pipeline_of(family), folder)
    build_plan(source.graph, source.profiles, folder / "model.fp16.plan", trt=trt)
    return folder / "model.fp16.plan"


@pytest.fixture
def model(plan: Path, graph: Path, trt: Any, cuda: Any) -> Iterator[LanguageModelPlan]:
    with LanguageModelPlan(plan, graph, trt=trt, cuda=cuda) as opened:
        yield opened


@pytest.fixture
def reference(graph: Path) -> LanguageModel:
    return LanguageModel.open(graph, threads=1)


def prompt_of(model: LanguageModelPlan, positions: int, seed: int) -> Prompt:
    """Text and speech; in CosyVoice 1 the text is given by its embeddings."""
    rng = np.random.default_rng(seed)
    ids = (model.spec.speech_offset + rng.integers(0, model.spec.speech_codes, positions)).astype(np.int32)
    if model.width is None:
        return Prompt(ids)
    ids[1:3] = EMBEDDED
    return Prompt(ids, rng.normal(size=(positions, model.width)).astype(np.float32))


def feed(model: LanguageModelPlan, row: int, past: int, prompt: Prompt) -> Any:
    """What `LanguageModel` does for one row: several ids behind those that are cached."""
    rows, cached, new = slice(row, row + 1), np.array([past], np.int32), np.array([len(prompt)], np.int32)
    embeddings = None if prompt.embeddings is None else prompt.embeddings[None]
    return model.run(rows, prompt.ids[None], cached, new, embeddings)[0].copy()


def step(model: LanguageModelPlan, ids: list[int], past: list[int]) -> Any:
    """What `LanguageModel` does for all rows: one id each."""
    fed, cached, new = (np.array(values, np.int32) for values in (ids, past, [1] * len(ids)))
    return model.run(slice(0, len(ids)), fed[:, None], cached, new).copy()


def test_rows_that_join_step_and_leave_hear_what_they_hear_on_the_host(
    model: LanguageModelPlan, reference: LanguageModel
) -> None:
    """Three prompts, steps together, one row leaves, a new prompt takes the free row, ids in one go."""
    assert (model.rows, model.spec) == (ROWS, reference.spec)
    first = model.spec.speech_offset

    def same(given: Any, wanted: Any) -> None:
        np.testing.assert_allclose(given, wanted, rtol=0, atol=LOGITS)

    counts: list[int] = []
    for row, positions in enumerate((5, 17, 9)):
        prompt = prompt_of(model, positions, row)
        model.clear(row)
        same(feed(model, row, 0, prompt), reference.join(prompt))
        counts.append(positions)
    for number in range(3):
        ids = [first + 10 * row + number for row in range(3)]
        same(step(model, ids, counts), reference.step(ids))
        counts = [count + 1 for count in counts]
    reference.leave(0)
    model.move(2, 0, counts[2])
    counts = [counts[2], counts[1]]
    same(step(model, [first, first + 1], counts), reference.step([first, first + 1]))
    counts = [count + 1 for count in counts]
    prompt = prompt_of(model, 6, 7)
    model.clear(2)
    same(feed(model, 2, 0, prompt), reference.join(prompt))
    more = np.arange(first, first + 4, dtype=np.int32)
    same(feed(model, 1, counts[1], Prompt(more)), reference.extend(1, Prompt(more)))
    counts = [counts[0], counts[1] + 4, 6]
    same(step(model, [first] * 3, counts), reference.step([first] * 3))


def test_a_new_row_hears_nothing_of_the_former_one(model: LanguageModelPlan) -> None:
    """Even of one that broke: a masked NaN would spread."""
    prompt = prompt_of(model, 6, 0)
    model.clear(1)
    alone = feed(model, 1, 0, prompt)
    for address in model._caches.values():
        broken = np.full(model._strides["key_cache.0"], 255, np.uint8)
        model._device.upload(address + model._strides["key_cache.0"], broken)
    assert not np.isfinite(feed(model, 1, 0, prompt)).all()
    model.clear(1)
    np.testing.assert_array_equal(feed(model, 1, 0, prompt), alone)


def test_steps_of_the_same_rows_set_nothing_anew(
    model: LanguageModelPlan, trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred addresses a step would cost more than the step."""
    calls: list[str] = []
    original = trt.IExecutionContext.set_tensor_address

    def counted(context: Any, name: str, memory: int) -> bool:
        calls.append(name)
        return bool(original(context, name, memory))

    monkeypatch.setattr(trt.IExecutionContext, "set_tensor_address", counted)
    prompt = prompt_of(model, 4, 0)
    feed(model, 0, 0, prompt)
    for past in range(4, 7):
        step(model, [model.spec.speech_offset], [past])
    tensors = len(model._plan.inputs) + len(model._plan.outputs)
    assert len(calls) == 2 * tensors  # once for the prompt, once for all steps


def test_more_than_the_engine_holds_is_refused(model: LanguageModelPlan, family: Family) -> None:
    pipeline = pipeline_of(family)
    model.fit(pipeline.longest_sequence, ROWS)
    for positions, rows in ((pipeline.longest_sequence + 1, 1), (1, ROWS + 1)):
        with pytest.raises(EngineError, match=f"holds 8 rows of {pipeline.longest_sequence} positions, not"):
            model.fit(positions, rows)
    with pytest.raises(EngineError, match="no profile admits"):
        feed(model, 0, 0, prompt_of(model, pipeline.longest_prompt + 1, 0))


def test_caches_of_half_precision_take_half_the_memory(
    model: LanguageModelPlan, graph: Path, family: Family, trt: Any, cuda: Any, tmp_path: Path
) -> None:
    half = ir.load(graph)
    caches = [value.name for value in half.graph.inputs if value.name and "_cache." in value.name]
    ir.save(to_half(half, half_names(half), caches), tmp_path / "half.onnx")
    plan = plan_of(tmp_path / "half.onnx", family, trt, tmp_path)
    with LanguageModelPlan(plan, tmp_path / "half.onnx", trt=trt, cuda=cuda) as halved:
        assert halved._strides == {name: size // 2 for name, size in model._strides.items()}
        heard = []
        for opened in (model, halved):
            opened.clear(3)
            prompt = prompt_of(opened, 7, 0)
            feed(opened, 3, 0, prompt)
            heard.append(feed(opened, 3, 7, Prompt(prompt.ids[-1:])))
    exact, rounded = heard
    assert rounded.dtype == np.float32
    assert 0 < np.abs(rounded - exact).max() < HALF * np.abs(exact).max()


@pytest.mark.parametrize("family", [COSYVOICE2])
def test_an_engine_that_does_not_update_in_place_is_refused(
    plan: Path, graph: Path, trt: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before TensorRT 10.15, which did not say which tensors share their memory."""
    monkeypatch.delattr(trt.ICudaEngine, "get_aliased_input_tensor")
    with pytest.raises(EngineError, match=r"updates its caches in place\. Build it with TensorRT 10\.15"):
        LanguageModelPlan(plan, graph, trt=trt, cuda=cuda)


@pytest.mark.parametrize("family", [COSYVOICE2])
def test_a_graph_that_is_no_language_model_is_refused(
    plan: Path, write_graph: WriteGraph, trt: Any, cuda: Any
) -> None:
    with pytest.raises(EngineError, match="no exported language model"):
        LanguageModelPlan(plan, write_graph("Relu", name="other.onnx"), trt=trt, cuda=cuda)


@pytest.mark.parametrize("family", [COSYVOICE1], ids=["embeddings"])
def test_embeddings_of_a_prompt_are_heard(model: LanguageModelPlan) -> None:
    prompt = prompt_of(model, 6, 0)
    assert prompt.embeddings is not None
    model.clear(0)
    heard = feed(model, 0, 0, prompt)
    changed = Prompt(prompt.ids, prompt.embeddings + 1)
    assert np.abs(feed(model, 0, 0, changed) - heard).max() > LOGITS


def test_an_opened_plan_decodes_as_its_graph_does(
    plan: Path,
    graph: Path,
    family: Family,
    reference: LanguageModel,
    trt: Any,
    cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the plan of its text encoder, where there is one."""
    for name, module in (("tensorrt", trt), ("cuda_runtime", cuda)):
        monkeypatch.setattr(language_model_plan, name, lambda module=module: module)
    (plan.parent / graph.name).unlink()  # the copy with a fixed cache that the plan was built from
    for file in graph.parent.glob("*.onnx"):
        (plan.parent / file.name).symlink_to(file)
    encoder = graph.with_name(text_encoder_of(graph.name))
    if encoder.exists():
        source = source_of("text_encoder", encoder, pipeline_of(family), plan.parent)
        build_plan(source.graph, source.profiles, plan.with_name(text_encoder_of(plan.name)), trt=trt)
    origin = Manifest.read(graph)
    replace(origin, artifact=plan.name, files={plan.name: sha256(plan)}, precision="fp16").write(plan.parent)
    opened = open_plan(plan, rows=4, max_positions=pipeline_of(family).longest_sequence)
    request = SpeechRequest([1, 2, 3], prompt_speech=[4, 5, 6, 7], speaker=np.ones(SPEAKER_WIDTH, np.float32))
    for model in (opened, reference):
        model.join(model.prompt_of(request))
        model.join(model.prompt_of(replace(request, text=[3, 2])))
    for code in range(3):
        ids = [opened.spec.speech_offset + code] * 2
        np.testing.assert_allclose(opened.step(ids), reference.step(ids), rtol=0, atol=LOGITS)
    for model in (opened, reference):
        model.leave(0)
    ids = [opened.spec.speech_offset]
    np.testing.assert_allclose(opened.step(ids), reference.step(ids), rtol=0, atol=LOGITS)
    cuda.allocated.clear()  # the end of the process gives it back
    cuda.streams.clear()
