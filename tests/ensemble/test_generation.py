"""One request: what it may ask for, and how its tokens are drawn, passed on and ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cosytriton_ensemble.errors import CancelledError, CosytritonError, InputError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.generation import FinishReason, Generation, Setting, SpeechRequest
from cosytriton_ensemble.llm_spec import LanguageModelSpec
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

# As in CosyVoice 3: the official code rules out another special token than the one that ends the speech.
START, EOS, OTHER = 60, 61, 63
SPEC = LanguageModelSpec(
    text_rows=50,
    text_encoder=False,
    speech_offset=50,
    speech_codes=60,
    speech_rows=64,
    sos_id=110,
    task_id=112,
    eos_id=EOS,
    fill_id=OTHER,
    official_min_length_id=START,
    stop_ids=frozenset(range(60, 64)),
    mix_ratio=(5, 15),
    layers=0,
    kv_heads=0,
    head_dim=0,
    sampler=RepetitionAwareSampler(),
)
TEXT = SpeechRequest([1, 2, 3], 1)  # two tokens to speak: 4 to 40 of speech


class Recorder:
    """A listener that remembers what it heard."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[tuple[CosytritonError | None, FinishReason | None]] = []
        self.gone = False

    def on_token(self, token: int) -> None:
        self.tokens.append(token)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        self.ends.append((error, reason))

    def cancelled(self) -> bool:
        return self.gone


def generation(
    request: SpeechRequest = TEXT,
    family: Family = COSYVOICE2,
    spec: LanguageModelSpec = SPEC,
    max_tokens: int = 1500,
    max_positions: int = 400,
) -> tuple[Generation, Recorder]:
    recorder = Recorder()
    setting = Setting(spec, family, max_tokens, max_positions, 30, lambda: None)
    return Generation(request, recorder, lambda: 0.5, setting), recorder


def favouring(*tokens: int) -> FloatArray:
    """Logits with which the first of these tokens that is allowed is drawn."""
    logits = np.zeros(SPEC.speech_rows, np.float32)
    logits[list(tokens)] = range(500, 500 - 50 * len(tokens), -50)
    return logits


def run(made: Generation, *order: int, cycle: int = 7) -> FinishReason:
    """Advance until the end; `order` is what the model favours, then one of `cycle` tokens in turn."""
    for step in range(10_000):
        if reason := made.advance(favouring(*order, 10 + step % cycle)):
            return reason
    raise AssertionError("it never ends")


# ---- the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", sorted(SPEC.stop_ids))
def test_every_special_token_is_ruled_out_at_first_and_then_ends_the_speech(stop: int) -> None:
    made, recorder = generation()
    assert run(made, stop) == "end"
    assert len(recorder.tokens) == len(made.tokens) == 4  # twice the tokens to speak
    assert max(recorder.tokens) < SPEC.speech_codes


@pytest.mark.parametrize(("stop", "count"), [(START, 4), (EOS, 0), (OTHER, 0)])
def test_the_official_minimum_length_rules_out_one_token_alone(stop: int, count: int) -> None:
    made, recorder = generation(replace(TEXT, official_min_length=True))
    assert run(made, stop) == "end"
    assert len(recorder.tokens) == count


def test_speech_without_an_end_has_a_length() -> None:
    assert [run_length(*arguments) for arguments in ((None, 1500, 400), (7, 1500, 400))] == [40, 7]
    assert run_length(None, 11, 400) == 11
    assert run_length(None, 1500, 5 + 9) == 9  # a prompt of five positions


def run_length(wanted: int | None, max_tokens: int, max_positions: int) -> int:
    made, recorder = generation(
        replace(TEXT, max_tokens=wanted), max_tokens=max_tokens, max_positions=max_positions
    )
    assert run(made, cycle=17) == "length"
    return len(recorder.tokens)


LONG = SpeechRequest([1] * 50)


@pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE2])
def test_speech_that_goes_in_circles_is_ended(family: Family) -> None:
    made, recorder = generation(LONG, family, max_positions=2000)
    assert run(made, cycle=12) == "repetition"
    assert len(recorder.tokens) == 4 * family.token_rate
    made, recorder = generation(replace(LONG, watchdog=False), family, max_positions=2000)
    assert run(made, cycle=12) == "length"
    assert len(recorder.tokens) == 1000


def test_silence_is_shortened_and_then_ended() -> None:
    made, recorder = generation(LONG, COSYVOICE3, max_positions=2000)
    silent = sorted(COSYVOICE3.silent_tokens)[:5]  # those below the vocabulary's end
    assert max(silent) < SPEC.speech_codes
    made.advance(favouring(40))
    for _ in range(99):
        assert made.advance(favouring(*silent)) is None
    assert made.advance(favouring(*silent)) == "silence"
    assert recorder.tokens == made.tokens[:6]  # the model hears all of them
    assert len(made.tokens) == 101
    assert made.last_id == SPEC.speech_offset + made.tokens[-1]


def test_the_listener_hears_the_reason_or_the_error() -> None:
    made, recorder = generation()
    error = InputError("no")
    made.end("length")
    made.end(error)
    assert recorder.ends == [(None, "length"), (error, None)]


def test_a_request_is_lost_when_its_listener_has_gone() -> None:
    made, recorder = generation()
    assert made.lost() is None
    recorder.gone = True
    assert isinstance(made.lost(), CancelledError)


# ---- what cannot be spoken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SpeechRequest([1, 2], 2), "2 are the reference's transcript"),
        (SpeechRequest([]), "nothing is left to speak"),
        (SpeechRequest([1, 2], -1), "nothing is left to speak"),
        (SpeechRequest([1, 50]), r"text holds the ids \[50\].* 0 to 49"),
        (SpeechRequest([-1]), r"text holds the ids \[-1\]"),
        (SpeechRequest([1], 0, [60]), r"prompt speech holds the ids \[60\].* 0 to 59"),
        (SpeechRequest([1] * 150), "needs 300 speech tokens .* room for 248"),
        (SpeechRequest([1], speaker=np.ones((1, 192), np.float32)), r"shape \[1, 192\].* must be \[192\]"),
    ],
)
def test_a_request_that_cannot_be_spoken_is_refused(wrong: SpeechRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generation(wrong)


def test_a_speaker_takes_a_position_where_it_is_embedded() -> None:
    speaker = np.ones(192, np.float32)
    spec = replace(SPEC, text_encoder=True, text_rows=5000)  # text ids need not stand before speech
    for given, room in ((None, 4), (0 * speaker, 4), (speaker, 3)):
        request = SpeechRequest([4999, 1], speaker=given)
        if room == 3:
            with pytest.raises(InputError, match="prompt of 5 positions there is room for 3"):
                generation(request, spec=spec, max_positions=8)
        else:
            generation(request, spec=spec, max_positions=8)


def test_text_cannot_be_added_to_a_complete_text() -> None:
    made, _ = generation()
    with pytest.raises(InputError, match="text_streaming is false"):
        made.push_text([1])
    made.end_text()
