"""Text that comes while it is spoken, in the engine: rows wait for it, and nothing else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cosytriton_ensemble import llm_engine
from cosytriton_ensemble.errors import CancelledError, CosytritonError, GenerationError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.generation import FinishReason, SpeechRequest, TextInput
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.llm_spec import LanguageModelSpec, Prompt
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

PATIENCE = 20  # seconds; nothing here takes as long unless it hangs
EOS, FILL = 60, 62
SPECIALS = (EOS, 61, FILL)
SPEC = LanguageModelSpec(
    text_rows=50,
    text_encoder=False,
    speech_offset=50,
    speech_codes=EOS,
    speech_rows=63,
    sos_id=113,
    task_id=114,
    eos_id=EOS,
    fill_id=FILL,
    official_min_length_id=EOS,
    mix_ratio=(3, 7),
    stop_ids=frozenset(SPECIALS),
    layers=0,
    kv_heads=0,
    head_dim=0,
    sampler=RepetitionAwareSampler(),
)


class FakeModel:
    """Its logits are a hash of the row's own sequence, so that rows that are mixed up show."""

    spec = SPEC
    max_positions = 400

    def __init__(self, rows: int = 8, banned: Sequence[int] = (61,)) -> None:
        self.rows, self._banned = rows, list(banned)
        self.sequences: list[list[int]] = []
        self.steps: list[tuple[int, int]] = []  # rows of each, and how many of them waited for text
        self.seconds = 0.0  # of a step

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        return self.spec.prompt(request.text, request.prompt_speech)

    def join(self, prompt: Prompt) -> FloatArray:
        self.sequences.append(prompt.ids.tolist())
        return self._logits(self.sequences[-1])

    def fits(self, lengths: Sequence[int]) -> bool:
        return bool(lengths)

    def extend(self, row: int, new: Prompt) -> FloatArray:
        self.sequences[row] += new.ids.tolist()
        return self._logits(self.sequences[row])

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        time.sleep(self.seconds)
        for row, (sequence, new) in enumerate(zip(self.sequences, ids, strict=True)):
            if row not in waiting:
                sequence.append(new)
        self.steps.append((len(ids), len(waiting)))
        return np.stack([self._logits(sequence) for sequence in self.sequences])

    def leave(self, row: int) -> None:
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()

    def _logits(self, sequence: list[int]) -> FloatArray:
        logits = np.random.default_rng(sequence).normal(0, 2, SPEC.speech_rows).astype(np.float32)
        logits[self._banned] = -np.inf
        return logits


class Recorder:
    """A listener that remembers what it heard."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.gone = False
        self.asked = 0
        self._error: CosytritonError | None = None
        self._ended = threading.Event()

    def on_token(self, token: int) -> None:
        self.tokens.append(token)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        assert (error is None) != (reason is None)
        self._error = error
        self._ended.set()

    def cancelled(self) -> bool:
        self.asked += 1
        return self.gone

    @property
    def error(self) -> CosytritonError | None:
        assert self._ended.wait(PATIENCE), "the request never ended"
        return self._error

    def result(self) -> list[int]:
        assert self.error is None
        return self.tokens


def request(index: int, max_tokens: int | None = None) -> SpeechRequest:
    """Requests of unequal lengths; equal indices are equal requests."""
    rng = np.random.default_rng(index)
    text = rng.integers(0, SPEC.text_rows, 7 + 2 * index).tolist()
    speech = rng.integers(0, SPEC.speech_codes, 3 * index % 11).tolist()
    return SpeechRequest(text, 2, speech, index, max_tokens)


def submit(engine: LlmEngine, wanted: SpeechRequest) -> Recorder:
    recorder = Recorder()
    engine.submit(wanted, recorder).end_text()
    return recorder


def alone(wanted: SpeechRequest, banned: Sequence[int] = (61,)) -> list[int]:
    with LlmEngine(FakeModel(banned=banned), COSYVOICE2) as engine:
        return submit(engine, wanted).result()


def streamed(index: int, known: int = 2) -> SpeechRequest:
    """A request like that of this index, of whose text so much is known at first."""
    whole = request(index)
    return replace(whole, text=whole.text[:known], text_streaming=True)


def push(text_input: TextInput, index: int, known: int = 2, pause: float = 0) -> None:
    for token in request(index).text[known:]:
        time.sleep(pause)
        text_input.push_text([token])
    text_input.end_text()


def submit_streamed(engine: LlmEngine, index: int, known: int = 2) -> tuple[Recorder, TextInput]:
    recorder = Recorder()
    return recorder, engine.submit(streamed(index, known), recorder)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of requests 0 to 7, each alone in an engine."""
    return [alone(request(index)) for index in range(8)]


@pytest.fixture(scope="module")
def expected_streamed() -> list[list[int]]:
    """The tokens of requests 0 to 7, each alone in an engine, its text all there but in blocks."""
    results = [alone(replace(request(index), text_streaming=True)) for index in range(8)]
    assert len({len(tokens) for tokens in results}) > 4
    return results


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_streamed_requests_equal_themselves_alone(
    rows: int, expected: list[list[int]], expected_streamed: list[list[int]]
) -> None:
    model = FakeModel(rows)
    model.seconds = 0.001
    with LlmEngine(model, COSYVOICE2) as engine:
        whole = [submit(engine, request(index)) for index in range(4)]
        pairs = [submit_streamed(engine, index) for index in range(8)]
        threads = [
            threading.Thread(target=push, args=(text_input, index, 2, 0.01 * (index % 3)))
            for index, (_, text_input) in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()
        assert [recorder.result() for recorder, _ in pairs] == expected_streamed
        assert [recorder.result() for recorder in whole] == expected[:4]
        for thread in threads:
            thread.join()
    assert model.sequences == []
    if rows == 8:
        assert max(waiting for _, waiting in model.steps) > 1


def test_a_row_that_waits_takes_part_and_is_not_fed() -> None:
    model = FakeModel(banned=SPECIALS)
    model.seconds = 0.001
    with LlmEngine(model, COSYVOICE2) as engine:
        slow, text_input = submit_streamed(engine, 2, known=5)
        wait_until(lambda: model.steps)  # behind six speech tokens of the prompt one fills the block
        fast = submit(engine, request(1, max_tokens=30))
        wait_until(lambda: len(fast.tokens) > 5)
        sequence = list(model.sequences[0])
        assert fast.result() == alone(request(1, max_tokens=30), SPECIALS)
        assert model.sequences == [sequence]
        assert model.steps == [(1, 0)] + [(2, 1)] * 29
        push(text_input, 2, known=5)
        whole = replace(request(2), text_streaming=True)
        assert slow.result() == alone(whole, SPECIALS)


def test_the_engine_sleeps_while_all_wait_and_wakes_when_text_comes(
    expected_streamed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    with LlmEngine(model, COSYVOICE2) as engine:
        pairs = [submit_streamed(engine, index, known=5) for index in range(3)]
        wait_until(lambda: engine.stats().active == 3 and all(recorder.tokens for recorder, _ in pairs))
        time.sleep(0.2)
        steps, asked = len(model.steps), pairs[0][0].asked
        time.sleep(0.5)
        assert len(model.steps) == steps
        assert 1 <= pairs[0][0].asked - asked <= 0.5 / llm_engine.POLL_SECONDS + 2
        for index, (_, text_input) in enumerate(pairs):
            push(text_input, index, known=5)
        assert [recorder.result() for recorder, _ in pairs] == expected_streamed[:3]

    monkeypatch.setattr(llm_engine, "POLL_SECONDS", 2 * PATIENCE)  # now only a push can wake it
    with LlmEngine(FakeModel(), COSYVOICE2) as engine:
        recorder, text_input = submit_streamed(engine, 4)
        push(text_input, 4, pause=0.01)
        assert recorder.result() == expected_streamed[4]


def test_a_cancelled_request_that_waits_frees_its_row_at_once(expected: list[list[int]]) -> None:
    model = FakeModel(rows=1)
    with LlmEngine(model, COSYVOICE2) as engine:
        recorder, text_input = submit_streamed(engine, 2, known=5)
        wait_until(lambda: recorder.tokens)
        other = submit(engine, request(3))
        time.sleep(0.1)
        assert other.tokens == []
        recorder.gone = True
        assert isinstance(recorder.error, CancelledError)
        assert other.result() == expected[3]
        text_input.push_text([1])  # too late, and no harm
        text_input.end_text()


def test_a_request_without_text_holds_no_row(
    expected: list[list[int]], expected_streamed: list[list[int]]
) -> None:
    with LlmEngine(FakeModel(rows=1), COSYVOICE2) as engine:
        recorder, text_input = submit_streamed(engine, 5)
        assert submit(engine, request(3)).result() == expected[3]
        assert engine.stats().waiting == 1
        push(text_input, 5)
        assert recorder.result() == expected_streamed[5]


@pytest.mark.parametrize("known", [2, 5])
def test_text_that_does_not_come_ends_its_own_request_only(known: int, expected: list[list[int]]) -> None:
    model = FakeModel()
    with LlmEngine(model, COSYVOICE2, text_timeout=0.2) as engine:
        recorder, _ = submit_streamed(engine, 2, known)
        other = submit(engine, request(3))
        assert isinstance(recorder.error, GenerationError)
        assert "waited 0.2 s for more text" in str(recorder.error)
        assert other.result() == expected[3]
    assert model.sequences == []


def test_a_failing_block_of_text_ends_its_own_request_only(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    monkeypatch.setattr(model, "extend", lambda *_: 1 / 0)
    with LlmEngine(model, COSYVOICE2) as engine:
        other = submit(engine, request(3))
        recorder, text_input = submit_streamed(engine, 2)
        push(text_input, 2)
        assert isinstance(recorder.error, GenerationError)
        assert "division by zero" in str(recorder.error)
        assert other.result() == expected[3]


def test_closing_fails_what_waits_for_text() -> None:
    engine = LlmEngine(FakeModel(), COSYVOICE2)
    pairs = [submit_streamed(engine, 2, known) for known in (2, 5)]
    wait_until(lambda: engine.stats().active == 1)
    engine.close()
    assert all("closed" in str(recorder.error) for recorder, _ in pairs)
    push(pairs[0][1], 2)
