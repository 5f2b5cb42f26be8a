"""Text that comes while it is spoken: what is fed when, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cosytriton_ensemble.bistream import StreamedGeneration
from cosytriton_ensemble.errors import CancelledError, CosytritonError, GenerationError, InputError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.generation import FinishReason, Setting, SpeechRequest
from cosytriton_ensemble.llm_spec import LanguageModelSpec
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

SOS, TASK, OFFSET = 110, 112, 50
START, EOS, FILL, OTHER = 60, 61, 62, 63
SPEC = LanguageModelSpec(
    text_rows=OFFSET,
    text_encoder=False,
    speech_offset=OFFSET,
    speech_codes=START,
    speech_rows=64,
    sos_id=SOS,
    task_id=TASK,
    eos_id=EOS,
    fill_id=FILL,
    official_min_length_id=START,
    stop_ids=frozenset(range(START, 64)),
    mix_ratio=(3, 7),
    layers=0,
    kv_heads=0,
    head_dim=0,
    sampler=RepetitionAwareSampler(),
)


@dataclass
class Recorder:
    """A listener that remembers its tokens."""

    tokens: list[int] = field(default_factory=list)
    gone: bool = False

    def on_token(self, token: int) -> None:
        self.tokens.append(token)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None: ...

    def cancelled(self) -> bool:
        return self.gone


@dataclass
class Run:
    """A request without an engine or a model: what the row was fed, and what was drawn."""

    request: SpeechRequest
    max_tokens: int = 1500
    max_positions: int = 4000
    text_timeout: float = 30
    wakes: int = 0
    fed: list[list[int]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        setting = Setting(
            SPEC, COSYVOICE2, self.max_tokens, self.max_positions, self.text_timeout, self._wake
        )
        self.generation = StreamedGeneration(self.request, self.recorder, lambda: 0.5, setting)

    def _wake(self) -> None:
        self.wakes += 1

    def push(self, *ids: int) -> Run:
        self.generation.push_text(ids)
        return self

    def end(self) -> Run:
        self.generation.end_text()
        return self

    def speak(self, *favoured: int) -> FinishReason | None:
        """Go on until the speech is over or text is missing. The model favours these tokens, or any."""
        while True:
            if self.generation.waits:
                if not self.generation.ready():
                    return None
                self.fed.append(self.generation.take().ids.tolist())
            self.steps += 1
            if reason := self.generation.advance(favouring(*favoured, 10 + self.steps % 13)):
                return reason


def favouring(*tokens: int) -> FloatArray:
    logits = np.zeros(SPEC.speech_rows, np.float32)
    logits[list(tokens)] = range(500, 500 - 50 * len(tokens), -50)
    return logits


def streamed(
    text: Sequence[int] = (), prompt_text_count: int = 0, prompt_speech: Sequence[int] = (), prefix: int = 0
) -> SpeechRequest:
    return SpeechRequest(
        text, prompt_text_count, prompt_speech, text_streaming=True, prefix_count=prefix, watchdog=False
    )


def speech(*tokens: int) -> list[int]:
    return [OFFSET + token for token in tokens]


# ---- blocks ---------------------------------------------------------------------------------------------


def test_blocks_of_text_are_fed_where_the_speech_before_them_is_full() -> None:
    run = Run(streamed())
    assert run.speak() is None
    assert run.fed == []  # two text tokens would be no block
    assert run.push(1, 2).speak() is None
    assert run.push(3, 4, 5).speak() is None
    assert run.fed == [[SOS, 1, 2, 3]]
    assert len(run.recorder.tokens) == 7
    run.push(6).speak()
    run.push(7).end().speak(EOS)
    last = speech(run.recorder.tokens[-1])
    assert run.fed[1:] == [[4, 5, 6], [*last, 7, TASK]]  # the official code feeds the last token again
    assert len(run.recorder.tokens) == 14


def test_prompt_speech_is_fed_with_the_text_before_it() -> None:
    run = Run(streamed([1, 2, 3, 4], 4, list(range(9))))
    assert run.speak() is None
    assert run.push(5).speak() is None
    assert run.push(6, 7).speak() is None
    assert run.fed == [[SOS, 1, 2, 3, *speech(*range(7)), 4, 5, 6, *speech(7, 8)]]
    assert len(run.recorder.tokens) == 5  # with two of the prompt they fill the block
    last = speech(run.recorder.tokens[-1])
    assert run.end().speak(EOS) == "end"
    assert run.fed[1:] == [[*last, 7, TASK]]


def test_prompt_speech_that_the_text_was_too_short_for_is_not_lost() -> None:
    run = Run(streamed([1, 2, 3, 4], 3, list(range(9)))).end()
    assert run.speak(EOS) == "end"
    assert run.fed == [[SOS, 1, 2, 3, *speech(*range(7)), 4, TASK, *speech(7, 8)]]


def test_a_prefix_stands_before_all_blocks() -> None:
    run = Run(streamed([1, 2, 3, 4, 5], 4, [8, 9], prefix=2)).push(6, 7)
    run.speak()
    last = speech(run.recorder.tokens[-1])
    run.end().speak(EOS)
    assert run.fed == [[SOS, 1, 2, 3, 4, 5, *speech(8, 9)], [*last, 6, 7, TASK]]


def test_behind_a_prefix_without_prompt_speech_text_comes_first_too() -> None:
    run = Run(streamed([1, 2], 2, prefix=2))
    assert run.speak() is None
    run.push(3, 4, 5).speak()
    assert run.fed == [[SOS, 1, 2, 3, 4, 5]]


def test_a_short_text_is_laid_out_as_one_that_is_complete() -> None:
    run = Run(streamed([1, 2])).end()
    run.speak()
    assert run.fed == [[SOS, 1, 2, TASK]]


def test_when_the_text_comes_changes_nothing() -> None:
    text = list(range(17))
    at_once, slowly, before = Run(streamed([30], 1)), Run(streamed([30], 1)), Run(streamed([30, *text], 1))
    at_once.push(*text).end()
    for token in text:
        slowly.push(token).speak()
    slowly.end()
    before.end()
    for run in (at_once, slowly, before):
        assert run.speak() == "length"
    assert at_once.fed == slowly.fed == before.fed
    assert at_once.recorder.tokens == slowly.recorder.tokens == before.recorder.tokens


# ---- special tokens -------------------------------------------------------------------------------------


def test_the_model_may_ask_for_text_early() -> None:
    run = Run(streamed([1, 2, 3, 4, 5, 6]))
    assert run.generation.ready()
    run.generation.take()
    for tokens in ([10], [11], [FILL]):
        run.generation.advance(favouring(*tokens))
    assert run.recorder.tokens == [10, 11]
    run.speak()
    assert run.fed == [[4, 5, 6]]
    assert len(run.recorder.tokens) == 2 + 7  # the next block is full again


def test_only_the_special_token_that_has_a_meaning_can_be_drawn() -> None:
    run = Run(streamed([1, 2, 3]))
    assert run.speak(EOS, START, OTHER) is None
    assert len(run.recorder.tokens) == 7
    assert run.push(4).end().speak(FILL, START, OTHER) == "length"
    assert max(run.recorder.tokens) < SPEC.speech_codes
    assert Run(streamed([1])).end().speak(FILL, EOS) == "end"


def test_fill_tokens_count_among_the_last_tokens_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    histories: list[list[int]] = []
    sample = RepetitionAwareSampler.sample

    def recording(
        self: RepetitionAwareSampler, logits: FloatArray, history: Sequence[int], uniform: Callable[[], float]
    ) -> int:
        histories.append(list(history))
        return sample(self, logits, history, uniform)

    monkeypatch.setattr(RepetitionAwareSampler, "sample", recording)
    Run(streamed([1, 2, 3, 4, 5, 6])).speak()
    assert histories[7][7] == FILL
    assert len(histories) == 14  # a fill token whose turn has come is not drawn


# ---- limits ---------------------------------------------------------------------------------------------


def test_the_minimum_length_of_the_text_counts_once_it_is_complete() -> None:
    run = Run(streamed([1, 2, 3, 4], 1)).end()
    assert run.speak(EOS) == "end"
    assert len(run.recorder.tokens) == 7  # more than two for each of three
    short = streamed([1, 2], 0)
    for request, count in ((short, 4), (replace(short, official_min_length=True), 0)):
        run = Run(request).end()
        assert run.speak(EOS) == "end"
        assert len(run.recorder.tokens) == count


def test_twenty_tokens_for_each_text_token_once_the_text_is_complete() -> None:
    run = Run(streamed([1, 2], 1))
    assert run.push(3, 4).end().speak() == "length"
    assert len(run.recorder.tokens) == 7 + 60
    instructed = Run(streamed([1] * 12, 12)).push(2)  # each block of the instruction is spoken too
    assert instructed.speak() is None
    assert len(instructed.recorder.tokens) == 4 * 7
    assert instructed.end().speak() == "length"
    assert len(instructed.recorder.tokens) == 4 * 7 + 20
    capped = Run(replace(streamed([1, 2, 3, 4]), max_tokens=9)).end()
    assert capped.speak() == "length"
    assert len(capped.recorder.tokens) == 9


def test_the_room_for_speech_ends_it_before_the_text_has_ended() -> None:
    run = Run(streamed([1, 2, 3, 4, 5, 6]), max_positions=3 + 6 + 13)
    assert run.speak() == "length"
    assert len(run.recorder.tokens) == 13


def test_text_that_cannot_be_spoken_is_refused_where_it_is_pushed() -> None:
    run = Run(streamed([1, 2]), max_tokens=10)
    with pytest.raises(InputError, match=r"text holds the ids \[50\]"):
        run.push(3, 50)
    with pytest.raises(InputError, match="6 tokens needs 12 .* room for 10"):
        run.push(3, 4, 5, 6)
    run.push(3, 4, 5).end()  # nothing of what was refused has been taken
    with pytest.raises(InputError, match="1 text ids came after the end"):
        run.push(6)
    assert run.speak() == "length"
    assert run.fed[0] == [SOS, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (streamed([1], 2), "nothing is left to speak"),
        (streamed([1, 2], prefix=3), "prefix has 3 text tokens; 0 to 2"),
        (streamed([1, 2], prefix=-1), "prefix has -1"),
        (streamed([50]), r"text holds the ids \[50\]"),
    ],
)
def test_a_request_that_cannot_be_spoken_is_refused(wrong: SpeechRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Run(wrong)


def test_a_model_without_a_fill_token_takes_no_streamed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SPEC", replace(SPEC, fill_id=None))
    with pytest.raises(InputError, match="Give the whole text at once"):
        Run(streamed([1]))


# ---- waiting --------------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run = Run(streamed(), text_timeout=5)
    now += 4
    run.push(1)
    now += 4
    assert run.generation.lost() is None  # text has come in between
    now += 1
    assert isinstance(error := run.generation.lost(), GenerationError)
    assert "waited 5 s for more text" in str(error)

    run.push(2, 3)
    now += 60
    assert run.generation.lost() is None  # it has what it needs
    run.speak()
    assert run.generation.lost() is None  # it has only begun to wait
    now += 5
    assert isinstance(run.generation.lost(), GenerationError)
    run.end()
    assert run.generation.lost() is None


def test_a_text_that_ends_without_a_word_is_an_error() -> None:
    run = Run(streamed([1, 2, 3, 4], 4)).end()
    assert run.speak() is None
    assert run.fed == []
    assert isinstance(error := run.generation.lost(), InputError)
    assert "before there was anything to speak" in str(error)


def test_a_waiting_request_is_lost_when_its_listener_has_gone() -> None:
    run = Run(streamed())
    run.recorder.gone = True
    assert isinstance(run.generation.lost(), CancelledError)


def test_threads_push_while_it_speaks() -> None:
    run = Run(streamed())
    threads = [threading.Thread(target=lambda: [run.push(1) for _ in range(30)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        run.speak()
    assert run.wakes == run.generation.target == 120
    assert run.end().speak(EOS) == "end"
    assert sum(ids.count(1) for ids in run.fed) == 120
