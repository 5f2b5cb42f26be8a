"""The exported language model in its engine: the official run, and rows that do not touch each other."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_state

from cosytriton_ensemble.errors import CosytritonError, RepositoryError
from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.language_model import CAPACITY_STEP, LanguageModel, LanguageModelSpec, TokenIds
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.sampling import FloatArray
from cosytriton_export import llm
from cosytriton_export.llm_graph import export_llm

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = 8


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny official model as a graph."""
    weights = GOLDEN / "llm_v2_weights.safetensors"
    with safe_open(weights, "np") as file:
        sizes = {key: float(value) for key, value in file.metadata().items()}
    whole = {key: int(value) for key, value in sizes.items() if value.is_integer()}
    qwen_config = {
        "hidden_size": whole["hidden"],
        "intermediate_size": whole["inter"],
        "num_hidden_layers": whole["layers"],
        "num_attention_heads": whole["heads"],
        "num_key_value_heads": whole["kv_heads"],
        "rope_theta": sizes["rope_theta"],
        "rms_norm_eps": sizes["rms_eps"],
    }
    sampling = {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}
    llm_config = {"speech_token_size": whole["speech_token_size"], "sampling": sampling}
    path = tmp_path_factory.mktemp("llm") / "model.onnx"
    model = llm.LanguageModel.from_state(qwen_config, llm_config, load_state(weights), "the golden weights")
    with torch.no_grad():
        export_llm(model, path)
    return path


@pytest.fixture
def model(graph: Path) -> LanguageModel:
    return LanguageModel.open(graph, threads=1, rows=ROWS)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return load_file(GOLDEN / "llm_v2.safetensors")


class Recorder:
    """A listener that remembers what it heard; it cancels itself after `patience` tokens."""

    def __init__(self, patience: int | None = None) -> None:
        self.tokens: list[int] = []
        self.error: CosytritonError | None = None
        self._patience = patience
        self._ended = threading.Event()

    def on_token(self, token: int) -> None:
        self.tokens.append(token)

    def on_end(self, error: CosytritonError | None) -> None:
        self.error = error
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


def prompts(model: LanguageModel) -> list[TokenIds]:
    return [model.spec.prompt(request(index).text, request(index).prompt_speech) for index in range(ROWS)]


def decode(model: LanguageModel, ids: TokenIds, steps: int) -> list[FloatArray]:
    """The logits of a prompt and of `steps` fed tokens, alone."""
    logits = [model.join(ids).copy()]
    logits += [model.step([fed(step)])[0].copy() for step in range(steps)]
    model.leave(0)
    return logits


def fed(step: int) -> int:
    return 7 * step % 300


# ---- the official run -----------------------------------------------------------------------------------


def test_the_official_run(model: LanguageModel, golden: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    recorded = iter(golden["ras_u"].tolist())
    text = [*golden["prompt_text"][0].tolist(), *golden["text"][0].tolist()]
    official = SpeechRequest(text, golden["prompt_text"].size, golden["prompt_speech_token"][0].tolist())
    with LlmEngine(model, uniform=lambda _: recorded.__next__) as engine:
        tokens = say(engine, official).result()
    assert tokens == golden["ras_ids"].tolist()
    assert len(golden["ras_u"]) - len(list(recorded)) == golden["ras_draws_used"]


# ---- rows -----------------------------------------------------------------------------------------------


def test_requests_together_equal_themselves_alone(graph: Path) -> None:
    expected = []
    for index in range(ROWS):
        with LlmEngine(LanguageModel.open(graph, threads=1, rows=1)) as engine:
            expected.append(say(engine, request(index)).result())
    assert len({len(tokens) for tokens in expected}) > ROWS // 2

    with LlmEngine(LanguageModel.open(graph, threads=2, rows=3)) as engine:
        recorders = [say(engine, request(index)) for index in range(ROWS)]
        assert [recorder.result() for recorder in recorders] == expected

    cancelled = {1: 2, 4: 9, 6: 0}  # request -> tokens after which it goes
    with LlmEngine(LanguageModel.open(graph, threads=1, rows=ROWS)) as engine:
        recorders = [say(engine, request(index), cancelled.get(index)) for index in range(ROWS)]
        for index, recorder in enumerate(recorders):
            assert recorder.result() == expected[index][: cancelled.get(index)]
            assert (recorder.error is None) == (index not in cancelled)


def test_logits_have_the_same_bits_in_every_batch(model: LanguageModel) -> None:
    steps = CAPACITY_STEP + 10  # the capacity grows on the way
    expected = [decode(model, ids, steps) for ids in prompts(model)]

    for row, ids in enumerate(prompts(model)):
        np.testing.assert_array_equal(model.join(ids), expected[row][0])
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


def test_the_capacity_follows_the_longest_row(model: LanguageModel) -> None:
    short, long = prompts(model)[0], prompts(model)[7]
    model.join(short)
    assert model.cache.capacity == CAPACITY_STEP
    model.join(long)
    assert model.cache.capacity == 2 * CAPACITY_STEP
    model.leave(1)
    model.step([fed(0)])
    assert model.cache.capacity == CAPACITY_STEP


def test_nan_of_a_former_row_does_not_spread(model: LanguageModel) -> None:
    ids = prompts(model)[2]
    expected = decode(model, ids, 3)
    for buffer in model.cache.buffers.values():
        buffer[:] = np.nan
    for logits, right in zip(decode(model, ids, 3), expected, strict=True):
        np.testing.assert_array_equal(logits, right)


def test_a_prompt_that_fails_takes_no_row(model: LanguageModel) -> None:
    ids = prompts(model)[2]
    expected = decode(model, ids, 1)
    beyond = np.array([10**6], np.int32)  # no such row in the embedding table
    with pytest.raises(Exception, match=r"(?i)indices|bounds"):
        model.join(beyond)
    for logits, right in zip(decode(model, ids, 1), expected, strict=True):
        np.testing.assert_array_equal(logits, right)


# ---- the graph's metadata -------------------------------------------------------------------------------


def test_another_graph_is_refused() -> None:
    session = ort.InferenceSession(GOLDEN / "campplus_tiny.onnx", providers=["CPUExecutionProvider"])
    with pytest.raises(RepositoryError, match=r"no metadata 'cosytriton\.llm'"):
        LanguageModel(session)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sampling": {"top_q": 1}}'])
def test_metadata_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(RepositoryError, match="Export the model again"):
        LanguageModelSpec.from_json(text)
