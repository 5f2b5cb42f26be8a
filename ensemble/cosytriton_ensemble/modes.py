"""The ways to speak: what of a voice and of the request's words each part of the model hears.

| mode          | language model's text before the text | its prompt speech | reference in the flow |
|---------------|---------------------------------------|-------------------|-----------------------|
| zero_shot     | transcript                            | yes               | yes                   |
| cross_lingual | none                                  | no                | yes                   |
| instruct      | instruction                           | no                | yes (v1: no)          |
| sft           | none                                  | no                | no                    |
| conversion    | no language model: the source's tokens go to the flow | | yes                 |

Official: `CosyVoiceFrontEnd`, its methods frontend_zero_shot, _cross_lingual, _instruct(2), _sft and _vc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import Family

Mode = Literal["zero_shot", "cross_lingual", "instruct", "sft", "conversion"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request brings."""

    mode: str = ""  # "": the one that its inputs mean
    text: bool = True  # whether there is a text, whole or streamed
    transcript: str = ""
    instruction: str = ""
    reference: bool = True  # the voice has prompt tokens and mel, not the speaker embedding alone
    source: bool = False  # there are speech tokens of a source recording


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parts of the model hear."""

    mode: Mode
    prompt_text: str  # before the text, in the language model
    prefix: str  # the part of `prompt_text` that an input by pieces begins with (v3's system prompt)
    lm_prompt: bool  # the reference's tokens follow the text in the language model
    lm_speaker: bool  # v1: the speaker embedding stands before the text
    flow_prompt: bool  # the flow continues the reference


def plan(family: Family, ask: Ask) -> Plan:
    """Decide the mode and what it means; InputError says why a combination cannot be spoken."""
    mode = _mode(ask)
    _check(family, mode, ask)
    words = {"zero_shot": ask.transcript, "instruct": ask.instruction}.get(mode, "")
    if mode != "conversion" and family.system_prompt and family.prompt_mark not in words:
        words = family.system_prompt + words
    if mode == "instruct" and "endofprompt" not in words:
        words += family.closing_mark
    mark = words.find(family.prompt_mark) if family.system_prompt else -1
    return Plan(
        mode,
        prompt_text=words,
        prefix=words[: mark + len(family.prompt_mark)] if mark >= 0 else "",
        lm_prompt=mode == "zero_shot",
        lm_speaker=mode != "instruct",
        flow_prompt=mode in ("zero_shot", "cross_lingual", "conversion")
        or (mode == "instruct" and family.bistream),
    )


def _mode(ask: Ask) -> Mode:
    if ask.mode:
        found = next((mode for mode in MODES if mode == ask.mode), None)
        if found is None:
            raise InputError(f"There is no mode {ask.mode!r}; allowed are {', '.join(MODES)}.")
        return found
    if ask.source:
        return "conversion"
    if ask.instruction:
        return "instruct"
    if not ask.reference:
        return "sft"
    return "zero_shot" if ask.transcript else "cross_lingual"


def _check(family: Family, mode: Mode, ask: Ask) -> None:
    """Refuse what contradicts the mode."""
    if mode == "conversion":
        if ask.text or not ask.source:
            raise InputError(
                "The mode 'conversion' takes the speech of a source recording instead of a text: "
                "give the source's tokens, and no text."
            )
    elif ask.source:
        raise InputError(f"The mode {mode!r} speaks a text; source tokens belong to 'conversion'.")
    elif not ask.text:
        raise InputError("There is no text to speak; give one, or source tokens to convert.")
    if mode != "instruct" and ask.instruction:
        raise InputError(f"The mode {mode!r} takes no instruction; leave it out, or ask for 'instruct'.")
    if mode == "instruct":
        _check_instruction(family, ask)
    if mode == "zero_shot" and not ask.transcript.strip():
        raise InputError(
            "The mode 'zero_shot' needs the transcript of the reference audio; give it, or ask for "
            "'cross_lingual', which goes without."
        )
    needs_reference = mode in ("zero_shot", "cross_lingual", "conversion")
    if needs_reference and not ask.reference:
        raise InputError(
            f"The mode {mode!r} continues a reference recording, but this voice is a speaker embedding "
            "alone. Ask for 'sft', or give a voice with reference audio."
        )


def _check_instruction(family: Family, ask: Ask) -> None:
    if not ask.instruction.strip():
        raise InputError("The mode 'instruct' needs an instruction, such as 'Speak fast.'.")
    if family.prompt_mark and not ask.instruction.rstrip().endswith(family.prompt_mark):
        raise InputError(
            f"The instruction {ask.instruction[-40:]!r} does not end with {family.prompt_mark}; "
            f"{family.title} tells by it where the instruction ends and the text begins. Append it."
        )
    if family.bistream and not ask.reference:
        raise InputError(
            f"{family.title} follows an instruction in the voice of a reference recording, but this voice is "
            "a speaker embedding alone. Give a voice with reference audio."
        )
