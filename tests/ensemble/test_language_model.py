"""The exported language models in their engine: the official runs, and rows that do not touch each other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from cosytriton_ensemble.errors import CosytritonError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.generation import FinishReason, SpeechRequest, TextInput
from cosytriton_ensemble.kv_cache import CAPACITY_STEP, KeyValueCache
from cosytriton_ensemble.language_model import LanguageModel, OnnxModel
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.llm_spec import METADATA_KEY, LanguageModelSpec, Prompt
from cosytriton_ensemble.sampling import FloatArray

VERSIONS = {"v1": FAMILIES["cosyvoice1"], "v2": FAMILIES["cosyvoice2"], "v3": FAMILIES["cosyvoice3"]}
ROWS = 8
TOLERANCE = 1e-4  # of logits

GoldenOf = Callable[[str], Any]
Graphs = Callable[[str], Path]


@pytest.fixture(scope="session")
def graphs(golden_lm: Callable[[str], Any]) -> Graphs:
    """The tiny official model of a version ("v1"...) as a graph."""
    return lambda version: golden_lm(version).graph


@pytest.fixture
def model(graphs: Graphs) -> LanguageModel:
    return open_model(graphs("v2"))


def open_model(path: Path, rows: int = ROWS) -> LanguageModel:
    return LanguageModel.open(path, threads=1, rows=rows)


class Recorder:
    """A listener that remembers what it heard; it cancels itself after `patience` tokens."""

    def __init__(self, patience: int | None = None) -> None:
        self.tokens: list[int] = []
        self.error: CosytritonError | None = None
        self._patience = patience
        self._ended = threading.Event()

    def on_token(self, token: int) -> None:
        self.tokens.append(token)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        self.error, self.reason = error, reason
        self._ended.set()

    def cancelled(self) -> bool:
        return len(self.tokens) == self._patience

    def result(self) -> list[int]:
        assert self._ended.wait(60)
        return self.tokens


def say(engine: LlmEngine, request: SpeechRequest, patience: int | None = None) -> Recorder:
    recorder = Recorder(patience)
    engine.submit(request, recorder)
    return recorder


def request(index: int) -> SpeechRequest:
    rng = np.random.default_rng(index)
    text = rng.integers(0, 300, 5 + 4 * index).tolist()
    return SpeechRequest(text, 3, rng.integers(0, 251, 7 * index).tolist(), seed=index)


def prompts(model: LanguageModel) -> list[Prompt]:
    return [model.prompt_of(request(index)) for index in range(ROWS)]


def decode(model: LanguageModel, prompt: Prompt, steps: int) -> list[FloatArray]:
    """The logits of a prompt and of `steps` fed tokens, alone."""
    logits = [model.join(prompt).copy()]
    logits += [model.step([fed(step)])[0].copy() for step in range(steps)]
    model.leave(0)
    return logits


def fed(step: int) -> int:
    return 7 * step % 251


# ---- the official runs ----------------------------------------------------------------------------------


def official(run: Any) -> SpeechRequest:
    """The request of the recorded run."""
    text = [*run["prompt_text"][0].tolist(), *run["text"][0].tolist()]
    speaker = run["embedding"][0] if "embedding" in run else None
    speech = run["prompt_speech_token"][0].tolist()
    return SpeechRequest(text, run["prompt_text"].size, speech, speaker=speaker)


@pytest.mark.parametrize("official_min_length", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_official_run(version: str, official_min_length: bool, graphs: Graphs, golden: GoldenOf) -> None:
    run = golden(f"llm_{version}")
    recorded = iter(run["ras_u"].tolist())
    model = open_model(graphs(version))
    with LlmEngine(model, VERSIONS[version], uniform=lambda _: recorded.__next__) as engine:
        recorder = say(engine, replace(official(run), official_min_length=official_min_length))
        tokens = recorder.result()
    assert recorder.reason == "end"
    assert len(tokens) >= 2 * run["text"].size
    if official_min_length or version != "v3":  # whose official code rules out a token that is no end
        assert tokens == run["ras_ids"].tolist()
        assert len(run["ras_u"]) - len(list(recorded)) == run["ras_draws_used"]
    else:
        assert tokens != run["ras_ids"].tolist()


@pytest.mark.parametrize("mode", ["", "sft_", "instruct_"])
def test_the_modes_of_cosyvoice_1(mode: str, graphs: Graphs, golden: GoldenOf) -> None:
    run, model = golden("llm_v1"), open_model(graphs("v1"))
    zero_shot = official(run)
    prompt = model.prompt_of(
        {
            "": zero_shot,
            "sft_": SpeechRequest(run["text"][0].tolist(), speaker=zero_shot.speaker),
            "instruct_": SpeechRequest(zero_shot.text, 6, speaker=np.zeros(192, np.float32)),
        }[mode]
    )
    assert len(prompt) == run[f"{mode}lm_input"].shape[1]
    assert prompt.embeddings is not None
    embedded = prompt.ids == -1
    np.testing.assert_allclose(
        prompt.embeddings[embedded], run[f"{mode}lm_input"][0][embedded], atol=TOLERANCE
    )
    logits = model.join(prompt)
    tokens = []
    for _ in range(10):
        tokens.append(int(logits[: model.spec.speech_codes].argmax()))
        logits = model.step([model.spec.speech_offset + tokens[-1]])[0]
    assert tokens == run[f"{mode}greedy_ids"].tolist()[:10]


@pytest.mark.parametrize("pause", [None, 0, 0.01])
def test_the_official_run_with_streamed_text(pause: float | None, graphs: Graphs, golden: GoldenOf) -> None:
    run, model = golden("llm_v2"), MeasuredModel.open(graphs("v2"), threads=1, rows=1)
    recorded = iter(run["bi_u"].tolist())
    transcript, text = run["prompt_text"][0].tolist(), run["bi_text"][0].tolist()
    known = transcript if pause is not None else transcript + text
    speech = run["bi_prompt_speech_token"][0].tolist()
    with LlmEngine(model, COSYVOICE2, uniform=lambda _: recorded.__next__) as engine:
        recorder = Recorder()
        text_input = engine.submit(SpeechRequest(known, 6, speech, text_streaming=True), recorder)
        push(text_input, [] if pause is None else text, pause or 0)
        assert recorder.result() == run["bi_ids"].tolist()
    assert recorder.reason == "end"
    assert list(recorded) == []
    assert model.lengths == run["bi_step_input_len"].tolist()


class MeasuredModel(LanguageModel):
    """Remembers how many positions each run feeds to a row."""

    lengths: list[int]

    def join(self, prompt: Prompt) -> FloatArray:
        self.lengths = [len(prompt)]
        return super().join(prompt)

    def extend(self, row: int, new: Prompt) -> FloatArray:
        self.lengths.append(len(new))
        return super().extend(row, new)

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        self.lengths.append(1)
        return super().step(ids, waiting)


def push(text_input: TextInput, text: list[int], pause: float) -> None:
    for token in text:
        text_input.push_text([token])
        time.sleep(pause)
    text_input.end_text()


# ---- rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_together_equal_themselves_alone(version: str, graphs: Graphs) -> None:
    family, expected = VERSIONS[version], []
    for index in range(ROWS):
        with LlmEngine(open_model(graphs(version), rows=1), family) as engine:
            expected.append(say(engine, request(index)).result())
    assert len({len(tokens) for tokens in expected}) > ROWS // 2

    with LlmEngine(LanguageModel.open(graphs(version), threads=2, rows=3), family) as engine:
        recorders = [say(engine, request(index)) for index in range(ROWS)]
        assert [recorder.result() for recorder in recorders] == expected

    cancelled = {1: 2, 4: 9, 6: 0}  # request -> tokens after which it goes
    with LlmEngine(open_model(graphs(version)), family) as engine:
        recorders = [say(engine, request(index), cancelled.get(index)) for index in range(ROWS)]
        for index, recorder in enumerate(recorders):
            assert recorder.result() == expected[index][: cancelled.get(index)]
            assert (recorder.error is None) == (index not in cancelled)


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_streamed_requests_equal_themselves_alone(version: str, graphs: Graphs) -> None:
    family = VERSIONS[version]
    expected = [_stream([index], open_model(graphs(version), 1), family)[0] for index in range(4)]
    assert _stream([3, 2, 1, 0], open_model(graphs(version), 3), family, pause=0.005) == expected[::-1]


def _stream(indices: list[int], model: LanguageModel, family: Family, pause: float = 0) -> list[list[int]]:
    """The tokens of these requests, their text pushed at the same time, beside one of complete text."""
    recorders = []
    with LlmEngine(model, family) as engine:
        say(engine, request(6))
        for index in indices:
            whole, recorder = request(index), Recorder()
            known = SpeechRequest(
                whole.text[:4], 3, whole.prompt_speech, index, text_streaming=True, prefix_count=2
            )
            text_input = engine.submit(known, recorder)
            threading.Thread(target=push, args=(text_input, whole.text[4:], pause)).start()
            recorders.append(recorder)
        tokens = [recorder.result() for recorder in recorders]
    assert all(recorder.error is None for recorder in recorders)
    return tokens


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_sequence_may_be_fed_in_pieces(version: str, graphs: Graphs) -> None:
    model = open_model(graphs(version))
    ids = prompts(model)[7].ids
    assert len(ids) > CAPACITY_STEP
    expected = decode(model, Prompt(ids), 1)
    model.join(prompts(model)[0])
    model.join(Prompt(ids[:4]))
    model.extend(1, Prompt(ids[4:50]))
    np.testing.assert_allclose(model.extend(1, Prompt(ids[50:])), expected[0], atol=TOLERANCE)
    np.testing.assert_allclose(model.step([fed(0)] * 2)[1], expected[1], atol=TOLERANCE)


def test_rows_that_wait_are_not_fed_and_touch_no_other(model: LanguageModel) -> None:
    steps, fed_to_row_1 = CAPACITY_STEP + 4, 0
    expected = [decode(model, prompt, steps) for prompt in prompts(model)[:3]]
    for prompt in prompts(model)[:3]:
        model.join(prompt)
    for step in range(steps):
        waiting = {1} if 2 <= step < CAPACITY_STEP else set()  # the capacity grows meanwhile
        logits = model.step([fed(step), fed(fed_to_row_1), fed(step)], waiting)
        np.testing.assert_array_equal(logits[0], expected[0][step + 1])
        np.testing.assert_array_equal(logits[2], expected[2][step + 1])
        if not waiting:
            fed_to_row_1 += 1
            np.testing.assert_array_equal(logits[1], expected[1][fed_to_row_1])


def test_logits_have_the_same_bits_in_every_batch(model: LanguageModel) -> None:
    steps = CAPACITY_STEP + 10  # the capacity grows on the way
    expected = [decode(model, prompt, steps) for prompt in prompts(model)]

    for row, prompt in enumerate(prompts(model)):
        np.testing.assert_array_equal(model.join(prompt), expected[row][0])
    for step in range(steps):
        logits = model.step([fed(step)] * ROWS)
        for row in range(ROWS):
            np.testing.assert_array_equal(logits[row], expected[row][step + 1])


def test_rows_leave_and_the_others_go_on(model: LanguageModel) -> None:
    ids = prompts(model)
    expected = [decode(model, row, 6) for row in ids]
    for row in ids[:4]:
        model.join(row)
    model.step([fed(0)] * 4)
    model.leave(1)  # row 3 takes its place
    logits = model.step([fed(1)] * 3)
    for place, index in enumerate((0, 3, 2)):
        np.testing.assert_array_equal(logits[place], expected[index][2])
    np.testing.assert_array_equal(model.join(ids[5]), expected[5][0])
    logits = model.step([fed(2)] * 3 + [fed(0)])
    np.testing.assert_array_equal(logits[1], expected[3][3])
    np.testing.assert_array_equal(logits[3], expected[5][1])


def cache_of(model: LanguageModel) -> KeyValueCache:
    assert isinstance(model.model, OnnxModel)
    return model.model.cache


def test_the_capacity_follows_the_longest_row(model: LanguageModel) -> None:
    short, long = prompts(model)[0], prompts(model)[7]
    model.join(short)
    assert cache_of(model).capacity == CAPACITY_STEP
    model.join(long)
    assert cache_of(model).capacity == 2 * CAPACITY_STEP
    model.leave(1)
    model.step([fed(0)])
    assert cache_of(model).capacity == CAPACITY_STEP


def test_nan_of_a_former_row_does_not_spread(model: LanguageModel) -> None:
    ids = prompts(model)[2]
    expected = decode(model, ids, 3)
    for buffer in cache_of(model).buffers.values():
        buffer[:] = np.nan
    for logits, right in zip(decode(model, ids, 3), expected, strict=True):
        np.testing.assert_array_equal(logits, right)


def test_a_prompt_that_fails_takes_no_row(model: LanguageModel) -> None:
    ids = prompts(model)[2]
    expected = decode(model, ids, 1)
    beyond = Prompt(np.array([10**6], np.int32))  # no such row in the embedding table
    with pytest.raises(Exception, match=r"(?i)indices|bounds"):
        model.join(beyond)
    for logits, right in zip(decode(model, ids, 1), expected, strict=True):
        np.testing.assert_array_equal(logits, right)


# ---- the graph's metadata -------------------------------------------------------------------------------


def test_another_graph_is_refused(graphs: Graphs) -> None:
    session = ort.InferenceSession(graphs("v1").with_name("text_encoder.onnx"))
    with pytest.raises(RepositoryError, match=r"no metadata 'cosytriton\.llm'"):
        OnnxModel(session, 1)


@pytest.mark.parametrize("name", ["model.onnx", "model.int8.onnx"])
def test_a_model_without_its_own_text_encoder_is_refused(graphs: Graphs, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(graphs("v1"))
    with pytest.raises(RepositoryError, match="text embedded by another graph.*none beside it"):
        LanguageModel.open(tmp_path / name)
    encoder = tmp_path / name.replace("model", "text_encoder")
    encoder.symlink_to(graphs("v1").with_name("text_encoder.onnx"))
    assert LanguageModel.open(tmp_path / name).spec.text_encoder


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sampling": {"top_q": 1}}'])
def test_metadata_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(RepositoryError, match="Export the model again"):
        LanguageModelSpec.from_json(text)


def test_every_field_of_the_metadata_is_needed(graphs: Graphs) -> None:
    session = ort.InferenceSession(graphs("v2"), providers=["CPUExecutionProvider"])
    fields = json.loads(session.get_modelmeta().custom_metadata_map[METADATA_KEY])
    assert LanguageModelSpec.from_json(json.dumps(fields)).mix_ratio == (5, 15)
    for missing in fields:
        with pytest.raises(RepositoryError, match=missing):
            LanguageModelSpec.from_json(json.dumps({k: v for k, v in fields.items() if k != missing}))
