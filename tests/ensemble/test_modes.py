"""Every family and mode: what the parts of the model hear, and what is refused."""

from __future__ import annotations

import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_ensemble.modes import Ask, plan

MARK = "<|endofprompt|>"
SYSTEM = f"You are a helpful assistant.{MARK}"
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@EVERY_FAMILY
@pytest.mark.parametrize(
    ("ask", "mode"),
    [
        (Ask(transcript="what I said"), "zero_shot"),
        (Ask(), "cross_lingual"),
        (Ask(mode="cross_lingual", transcript="what I said"), "cross_lingual"),
        (Ask(reference=False), "sft"),
        (Ask(text=False, source=True), "conversion"),
    ],
)
def test_inputs_mean_a_mode(family: Family, ask: Ask, mode: str) -> None:
    assert plan(family, ask).mode == mode


@pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE2])
def test_the_language_model_hears_the_transcript_in_zero_shot_alone(family: Family) -> None:
    assert plan(family, Ask(transcript="what I said")).prompt_text == "what I said"
    assert plan(family, Ask(mode="cross_lingual", transcript="what I said")).prompt_text == ""
    heard = [plan(family, Ask(transcript=words)).lm_prompt for words in ("what I said", "")]
    assert heard == [True, False]


def test_v1_instructs_without_the_speaker_and_the_reference() -> None:
    made = plan(COSYVOICE1, Ask(instruction="A fiery rebel.", reference=False))
    assert (made.mode, made.prompt_text) == ("instruct", "A fiery rebel.<endofprompt>")
    assert [made.lm_speaker, made.lm_prompt, made.flow_prompt] == [False] * 3


@pytest.mark.parametrize("mark", ["<endofprompt>", "<|endofprompt|>"])
def test_v1_keeps_the_mark_that_an_instruction_has(mark: str) -> None:
    assert plan(COSYVOICE1, Ask(instruction=f"A rebel.{mark}")).prompt_text == f"A rebel.{mark}"


@pytest.mark.parametrize("family", [COSYVOICE2, COSYVOICE3])
def test_v2_and_v3_instruct_in_the_voice_of_the_reference(family: Family) -> None:
    made = plan(family, Ask(instruction=f"Speak fast.{MARK}"))
    assert (made.mode, made.prompt_text) == ("instruct", f"Speak fast.{MARK}")
    assert made.flow_prompt
    assert not made.lm_prompt


@pytest.mark.parametrize("family", [COSYVOICE2, COSYVOICE3])
def test_an_instruction_without_its_end_is_refused(family: Family) -> None:
    with pytest.raises(InputError, match=r"'Speak fast\.' does not end with <\|endofprompt\|>.*Append it"):
        plan(family, Ask(instruction="Speak fast."))


def test_v3_speaks_behind_the_system_prompt() -> None:
    """The official code refuses a request without the mark."""
    assert plan(COSYVOICE3, Ask(transcript="what I said")).prompt_text == f"{SYSTEM}what I said"
    assert plan(COSYVOICE3, Ask()).prompt_text == SYSTEM
    assert plan(COSYVOICE3, Ask(reference=False)).prompt_text == SYSTEM
    own = f"You are a pirate.{MARK}what I said"
    assert plan(COSYVOICE3, Ask(transcript=own)).prompt_text == own


def test_text_by_pieces_begins_behind_the_system_prompt_of_v3_alone() -> None:
    assert plan(COSYVOICE3, Ask(transcript="what I said")).prefix == SYSTEM
    assert plan(COSYVOICE2, Ask(transcript="what I said")).prefix == ""
    assert plan(COSYVOICE2, Ask(instruction=f"Speak fast.{MARK}")).prefix == ""


@EVERY_FAMILY
@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (Ask(mode="whisper"), "no mode 'whisper'; allowed are zero_shot, cross_lingual"),
        (Ask(text=False), "no text to speak"),
        (Ask(source=True), "'conversion' takes the speech of a source recording instead of a text"),
        (Ask(mode="conversion"), "give the source's tokens"),
        (Ask(mode="sft", text=False, source=True), "source tokens belong to 'conversion'"),
        (Ask(mode="zero_shot"), "'zero_shot' needs the transcript"),
        (Ask(mode="zero_shot", transcript="words", reference=False), "continues a reference recording"),
        (Ask(mode="cross_lingual", reference=False), "continues a reference recording"),
        (Ask(mode="conversion", text=False, source=True, reference=False), "continues a reference"),
        (Ask(mode="instruct"), "'instruct' needs an instruction"),
        (Ask(mode="sft", instruction=f"Speak fast.{MARK}"), "'sft' takes no instruction"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason(family: Family, ask: Ask, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        plan(family, ask)


@pytest.mark.parametrize("family", [COSYVOICE2, COSYVOICE3])
def test_an_instruction_needs_a_reference_except_in_v1(family: Family) -> None:
    with pytest.raises(InputError, match=f"{family.title} follows an instruction in the voice"):
        plan(family, Ask(instruction=f"Speak fast.{MARK}", reference=False))
