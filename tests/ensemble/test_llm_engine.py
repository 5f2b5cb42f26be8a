"""In-flight batching: every request ends once, and its tokens depend on itself alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pytest

from cosytriton_ensemble.decoder import Decoder
from cosytriton_ensemble.errors import (
    CancelledError,
    CosytritonError,
    GenerationError,
    InputError,
    QueueFullError,
)
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.generation import FinishReason, SpeechRequest
from cosytriton_ensemble.llm_engine import EngineStats, LlmEngine
from cosytriton_ensemble.llm_spec import LanguageModelSpec, Prompt
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

PATIENCE = 20  # seconds; nothing here takes as long unless it hangs
EOS, FILL = 60, 62
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
    stop_ids=frozenset({EOS, 61, FILL}),
    layers=0,
    kv_heads=0,
    head_dim=0,
    sampler=RepetitionAwareSampler(),
)


class FakeModel:
    """Its logits are a hash of the row's own sequence, so that rows that are mixed up show."""

    spec = SPEC
    max_positions = 400

    def __init__(
        self, rows: int = 8, favoured: int | None = None, banned: Sequence[int] = (61, FILL)
    ) -> None:
        self.rows = rows
        self.sequences, self.prompts = list[list[int]](), list[list[int]]()
        self.batches: list[int] = []  # rows of each step
        self.favoured, self.banned = favoured, list(banned)
        self.before_step: Callable[[], object] = lambda: None

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        return self.spec.prompt(request.text, request.prompt_speech, request.prompt_text_count)

    def fits(self, lengths: Sequence[int]) -> bool:
        return bool(lengths)

    def join(self, prompt: Prompt) -> FloatArray:
        self.prompts, self.sequences = [*self.prompts, []], [*self.sequences, []]
        return self.extend(len(self.sequences) - 1, prompt)

    def extend(self, row: int, new: Prompt) -> FloatArray:
        self.prompts[-1] += new.ids.tolist()
        self.sequences[row] += new.ids.tolist()
        return self._logits(self.sequences[row])

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        assert not waiting
        self.before_step()
        for sequence, new in zip(self.sequences, ids, strict=True):
            sequence.append(new)
        self.batches.append(len(ids))
        return np.stack([self._logits(sequence) for sequence in self.sequences])

    def leave(self, row: int) -> None:
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()

    def _logits(self, sequence: list[int]) -> FloatArray:
        logits = np.random.default_rng(sequence).normal(0, 2, SPEC.speech_rows).astype(np.float32)
        logits[self.banned] = -np.inf
        if self.favoured is not None:
            logits[self.favoured] = 100
        return logits


class Recorder:
    """A listener that remembers what it heard, and can act on it in the engine's own thread."""

    def __init__(self, on_token: Callable[[Recorder], object] = lambda _: None) -> None:
        self.tokens: list[int] = []
        self.ends: list[CosytritonError | None] = []
        self.reason: FinishReason | None = None
        self.gone = False
        self._act = on_token
        self._ended = threading.Event()

    def on_token(self, token: int) -> None:
        assert not self.ends
        self.tokens.append(token)
        self._act(self)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        assert (error is None) != (reason is None)
        self.ends.append(error)
        self.reason = reason
        self._ended.set()

    def cancelled(self) -> bool:
        return self.gone

    @property
    def error(self) -> CosytritonError | None:
        assert self._ended.wait(PATIENCE), "the request never ended"
        return self.ends[0]

    def result(self) -> list[int]:
        assert self.error is None
        return self.tokens


def request(index: int = 0, seed: int | None = None, max_tokens: int | None = None) -> SpeechRequest:
    """Requests of unequal lengths; equal indices are equal requests."""
    rng = np.random.default_rng(index)
    text = rng.integers(0, SPEC.speech_offset, 6 + index % 5).tolist()
    speech = rng.integers(0, SPEC.speech_codes, 3 * index % 11).tolist()
    return SpeechRequest(text, 2, speech, seed if seed is not None else index, max_tokens)


def alone(model: Decoder, wanted: SpeechRequest) -> list[int]:
    with LlmEngine(model, COSYVOICE2) as engine:
        return submit(engine, wanted).result()


def submit(engine: LlmEngine, wanted: SpeechRequest, on_token: Callable[[Recorder], object] = id) -> Recorder:
    recorder = Recorder(on_token)
    engine.submit(wanted, recorder)
    return recorder


def at(count: int, act: Callable[[Recorder], object]) -> Callable[[Recorder], object]:
    """Act when `count` tokens were heard."""
    return lambda recorder: act(recorder) if len(recorder.tokens) == count else None


def leave(recorder: Recorder) -> None:
    recorder.gone = True


def fail(*_: object) -> None:
    raise RuntimeError("the floor is lava")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of requests 0 to 7, each alone in an engine."""
    results = [alone(FakeModel(), request(index)) for index in range(8)]
    assert len({len(tokens) for tokens in results}) > 4
    return results


# ---- one request ----------------------------------------------------------------------------------------


def test_the_prompt_is_laid_out_as_the_model_was_trained() -> None:
    model = FakeModel()
    alone(model, SpeechRequest([5, 6, 7], 2, [3, 4]))
    assert model.prompts == [[113, 5, 6, 7, 114, 53, 54]]  # sos, text, task, speech behind the text ids


def test_the_reason_of_the_end_is_told() -> None:
    for favoured, reason in ((EOS, "end"), (None, "length")):
        with LlmEngine(
            FakeModel(favoured=favoured, banned=[61, FILL] if favoured else [EOS, 61, FILL]), COSYVOICE2
        ) as engine:
            recorder = submit(engine, request())
            assert recorder.result()
            assert recorder.reason == reason


def test_the_seed_decides() -> None:
    first, again, other = (alone(FakeModel(), request(3, seed)) for seed in (11, 11, 12))
    assert first == again != other


def test_a_request_that_cannot_be_spoken_is_refused() -> None:
    with LlmEngine(FakeModel(), COSYVOICE2, max_tokens=9) as engine:
        with pytest.raises(InputError, match="nothing is left to speak"):
            engine.submit(SpeechRequest([]), Recorder())
        with pytest.raises(InputError, match="room for 9"):
            engine.submit(SpeechRequest([1] * 5), Recorder())
        assert submit(engine, SpeechRequest([1, 2])).result()


# ---- many requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_requests_together_equal_themselves_alone(rows: int, expected: list[list[int]]) -> None:
    model, submitted = FakeModel(rows), threading.Event()
    model.before_step = lambda: submitted.wait(PATIENCE)
    with LlmEngine(model, COSYVOICE2) as engine:
        recorders = [submit(engine, request(index)) for index in range(8)]
        submitted.set()
        assert [recorder.result() for recorder in recorders] == expected
    assert max(model.batches) == rows
    assert model.sequences == []


def test_a_request_joins_and_leaves_while_another_one_runs() -> None:
    model = FakeModel(banned=[EOS, 61, FILL])
    late: list[Recorder] = []
    with LlmEngine(model, COSYVOICE2) as engine:
        long = request(1, max_tokens=30)
        short = request(2, max_tokens=6)
        first = submit(engine, long, at(5, lambda _: late.append(submit(engine, short))))
        together = first.result(), late[0].result()
    # Token 1 comes from the prompt. The late one joins after 5 tokens, shares 5 steps and leaves.
    assert model.batches == [1] * 4 + [2] * 5 + [1] * 20
    assert together == tuple(alone(FakeModel(banned=[EOS, 61, FILL]), wanted) for wanted in (long, short))


def test_stats_count_steps_and_tokens() -> None:
    model = FakeModel()
    seen: list[EngineStats] = []
    with LlmEngine(model, COSYVOICE2) as engine:
        recorders = [
            submit(engine, request(index), lambda _: seen.append(engine.stats())) for index in range(8)
        ]
        tokens = sum(len(recorder.result()) for recorder in recorders)
    assert max(stats.active for stats in seen) > 1
    assert engine.stats() == EngineStats(0, 0, len(model.batches), tokens, sum(model.batches))


# ---- cancellation ---------------------------------------------------------------------------------------


def test_cancelled_requests_leave_at_once_and_change_no_other(expected: list[list[int]]) -> None:
    model = FakeModel()
    cancelled = {1: 2, 4: 5, 7: 1}  # request -> tokens heard when it goes
    with LlmEngine(model, COSYVOICE2) as engine:
        recorders = [
            submit(engine, request(index), at(cancelled.get(index, -1), leave)) for index in range(8)
        ]
        for index, recorder in enumerate(recorders):
            if index in cancelled:
                assert isinstance(recorder.error, CancelledError)
                assert recorder.tokens == expected[index][: cancelled[index]]
            else:
                assert recorder.result() == expected[index]


def test_a_cancelled_row_takes_part_in_no_further_step() -> None:
    model = FakeModel()
    with LlmEngine(model, COSYVOICE2) as engine:
        assert isinstance(submit(engine, request(), at(3, leave)).error, CancelledError)
    assert model.batches == [1, 1]  # the first token came from the prompt


def test_a_waiting_request_can_be_cancelled() -> None:
    model = FakeModel(rows=1)
    waiting = Recorder()

    def act(first: Recorder) -> None:
        if len(first.tokens) == 1:
            engine.submit(request(), waiting)
            leave(waiting)
        # It is dropped before the very next step, not when its turn would come.
        assert len(waiting.ends) == (len(first.tokens) > 1)

    with LlmEngine(model, COSYVOICE2) as engine:
        assert submit(engine, request(), act).result()
        assert isinstance(waiting.error, CancelledError)
    assert len(model.prompts) == 1


# ---- limits and faults ----------------------------------------------------------------------------------


@pytest.fixture
def held() -> Iterator[tuple[FakeModel, threading.Event]]:
    """A model of one row whose steps wait for the event."""
    model, go = FakeModel(rows=1), threading.Event()
    model.before_step = lambda: go.wait(PATIENCE)
    yield model, go
    go.set()


def test_a_full_queue_refuses_with_its_numbers(held: tuple[FakeModel, threading.Event]) -> None:
    model, go = held
    with LlmEngine(model, COSYVOICE2, max_waiting=2) as engine:
        accepted = [submit(engine, request(index)) for index in range(3)]
        refused = Recorder()
        with pytest.raises(QueueFullError, match="3 at most"):
            engine.submit(request(3), refused)
        go.set()
        assert all(recorder.result() for recorder in accepted)
        assert refused.ends == []
        assert submit(engine, request(4)).result()  # there is room again


def test_a_failing_step_ends_the_active_requests_only(expected: list[list[int]]) -> None:
    model = FakeModel(rows=2)
    submitted = threading.Event()

    def before_step() -> None:
        assert submitted.wait(PATIENCE)
        if model.batches == [1, 2, 2]:
            model.before_step = lambda: None
            fail()

    model.before_step = before_step
    with LlmEngine(model, COSYVOICE2) as engine:
        recorders = [submit(engine, request(0)) for _ in range(2)]
        waiting = submit(engine, request(3))
        submitted.set()
        model_errors = [recorder.error for recorder in recorders]
        assert all(isinstance(error, GenerationError) for error in model_errors)
        assert all("the floor is lava" in str(error) for error in model_errors)
        assert waiting.result() == expected[3]
        assert submit(engine, request(5)).result() == expected[5]


def test_a_failing_prompt_ends_its_own_request_only(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    join = model.join
    monkeypatch.setattr(model, "join", lambda prompt: fail() if len(model.prompts) == 2 else join(prompt))
    with LlmEngine(model, COSYVOICE2) as engine:
        first, second, third = (submit(engine, request(index)) for index in range(3))
        assert isinstance(third.error, GenerationError)
        assert (first.result(), second.result()) == (expected[0], expected[1])


def test_a_row_of_nan_is_an_error_of_its_own_request(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    logits = model._logits
    poisoned = model.prompt_of(request(2)).ids.tolist()

    def broken(sequence: list[int]) -> FloatArray:
        bad = sequence[: len(poisoned)] == poisoned and len(sequence) == len(poisoned) + 3
        return logits(sequence) * np.float32("nan" if bad else 1)

    monkeypatch.setattr(model, "_logits", broken)
    with LlmEngine(model, COSYVOICE2) as engine:
        recorders = [submit(engine, request(index)) for index in range(4)]
        assert isinstance(recorders[2].error, GenerationError)
        assert "nan" in str(recorders[2].error)
        assert recorders[2].tokens == expected[2][:3]
        assert [recorders[index].result() for index in (0, 1, 3)] == [expected[index] for index in (0, 1, 3)]


def test_a_failing_listener_ends_its_own_request_only(expected: list[list[int]]) -> None:
    with LlmEngine(FakeModel(), COSYVOICE2) as engine:
        recorders = [submit(engine, request(0)), submit(engine, request(1), at(2, fail)), Recorder()]
        recorders[2].cancelled = fail  # type: ignore[assignment, method-assign]
        engine.submit(request(2), recorders[2])
        assert isinstance(recorders[1].error, GenerationError)
        assert isinstance(recorders[2].error, CancelledError)
        assert recorders[0].result() == expected[0]


def accepts(engine: LlmEngine) -> bool:
    try:
        engine.submit(request(), Recorder())
    except GenerationError:
        return False
    return True


def test_closing_fails_what_is_active_or_waiting(held: tuple[FakeModel, threading.Event]) -> None:
    model, go = held
    engine = LlmEngine(model, COSYVOICE2)
    recorders = [submit(engine, request(index)) for index in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    while accepts(engine):
        time.sleep(0.001)
    go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    for recorder in recorders:
        assert isinstance(recorder.error, GenerationError)
        assert "closed" in str(recorder.error)
    assert "llm-engine" not in {thread.name for thread in threading.enumerate()}
