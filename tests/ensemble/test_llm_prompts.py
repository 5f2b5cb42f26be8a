"""Prompts are fed in parts between the steps of others, as memory allows, and nobody hears a difference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from cosytriton_ensemble.errors import CancelledError, CosytritonError, GenerationError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.generation import FinishReason, SpeechRequest
from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.llm_engine import LlmEngine
from cosytriton_ensemble.llm_spec import Prompt
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.sampling import FloatArray

PATIENCE = 60  # seconds
CHUNK = 16
SHORT = SpeechRequest([1, 2, 3, 4, 5], 2, [3], seed=1, max_tokens=12)
LONG = SpeechRequest([1, 2, 3, 4, 5, 6], 2, [4] * 30, seed=2, max_tokens=12)


class Watched(LanguageModel):
    """Remembers what it was asked to do: positions of each part of a prompt, and the rows of steps."""

    log: list[int | str]
    broken = False

    def join(self, prompt: Prompt) -> FloatArray:
        self.log.append(len(prompt))
        return super().join(prompt)

    def extend(self, row: int, new: Prompt) -> FloatArray:
        if self.broken and len(new) == CHUNK:
            raise RuntimeError("the floor is lava")
        self.log.append(len(new))
        return super().extend(row, new)

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        self.log.append(f"{len(ids) - len(waiting)} rows")
        return super().step(ids, waiting)


class Recorder:
    """A listener that remembers what it heard, and acts on it."""

    def __init__(self, act: Callable[[int], object] = lambda _: None) -> None:
        self.tokens: list[int] = []
        self.gone = False
        self._act, self._error, self._ended = act, list[CosytritonError | None](), threading.Event()

    def on_token(self, token: int) -> None:
        self.tokens.append(token)
        self._act(len(self.tokens))

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:  # noqa: ARG002
        self._error.append(error)
        self._ended.set()

    def cancelled(self) -> bool:
        return self.gone

    @property
    def error(self) -> CosytritonError | None:
        assert self._ended.wait(PATIENCE)
        return self._error[0]

    def result(self) -> list[int]:
        assert self.error is None
        return self.tokens


@pytest.fixture
def model(tiny_repository: Path) -> Watched:
    opened = Watched.open(version_directory(tiny_repository, "speech_lm") / FP32_GRAPH, threads=1)
    opened.log = []
    return opened


@pytest.fixture
def alone(model: Watched) -> dict[int, list[int]]:
    """What each request says alone, by its seed."""
    said = {}
    for request in (SHORT, LONG):
        with LlmEngine(model, COSYVOICE2, chunk=CHUNK) as engine:
            recorder = Recorder()
            engine.submit(request, recorder)
            said[request.seed] = recorder.result()
    model.log.clear()
    return said


def speak(model: Watched, heard: int, late: Recorder, at: Callable[[int], object] = id) -> Recorder:
    """The short request, and from `heard` of its tokens on the long one."""
    with LlmEngine(model, COSYVOICE2, chunk=CHUNK) as engine:

        def act(count: int) -> None:
            if count == heard:
                engine.submit(LONG, late)
            at(count)

        first = Recorder(act)
        engine.submit(SHORT, first)
        assert first.error is None
        assert late.error is None or isinstance(late.error, CosytritonError)
    return first


def test_a_long_prompt_does_not_hold_up_the_others(model: Watched, alone: dict[int, list[int]]) -> None:
    late = Recorder()
    first = speak(model, 3, late)
    assert (first.result(), late.result()) == (alone[1], alone[2])
    # Of each, the start mark and the transcript are a part of their own.
    one, two = "1 rows", "2 rows"
    assert model.log[:11] == [3, 5, one, one, 3, one, 16, one, 16, one, 3]
    assert two in model.log[11:13]


def test_a_prompt_that_is_being_fed_can_be_cancelled(model: Watched, alone: dict[int, list[int]]) -> None:
    late = Recorder()
    first = speak(model, 3, late, lambda count: setattr(late, "gone", count == 5))
    assert first.result() == alone[1]
    assert isinstance(late.error, CancelledError)
    assert late.tokens == []
    assert "2 rows" not in model.log


def test_a_part_that_fails_ends_its_own_request_only(model: Watched, alone: dict[int, list[int]]) -> None:
    model.broken, late = True, Recorder()
    assert speak(model, 3, late).result() == alone[1]
    assert isinstance(late.error, GenerationError)
    assert "the floor is lava" in str(late.error)


@pytest.mark.parametrize("fits", [True, False])
def test_requests_wait_for_memory_and_one_is_always_spoken(
    fits: bool, model: Watched, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "fits", lambda lengths: fits and np.prod(lengths) > 0)
    late = Recorder()
    first = speak(model, 3, late)
    assert (first.result(), late.result()) == (alone[1], alone[2])
    assert ("2 rows" in model.log) == fits
