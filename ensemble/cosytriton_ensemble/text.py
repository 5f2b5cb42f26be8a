"""The text of a request: what is accepted, and its token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.pipeline import MAX_TEXT_TOKENS

MAX_CHARACTERS = 8 * MAX_TEXT_TOKENS  # looked at before the tokenizer, which need not see a whole book


class TextFrontend:
    """Turns the transcript of the reference and the text to speak into Qwen2 token ids."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def tokens(self, text: str, what: str) -> list[int]:
        """Ids of `text`; `what` names it in an InputError when it is empty, unspeakable or too long."""
        if not text.strip():
            raise InputError(f"The {what} is empty; give at least one word.")
        if not any(character.isalnum() for character in text):
            raise InputError(
                f"The {what} {text[:40]!r} holds no letter and no digit, so there is nothing to say."
            )
        if len(text) > MAX_CHARACTERS:
            raise _too_long(what, len(text), "characters", MAX_CHARACTERS)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > MAX_TEXT_TOKENS:
            raise _too_long(what, len(ids), "text tokens", MAX_TEXT_TOKENS)
        return ids


def _too_long(what: str, count: int, unit: str, limit: int) -> InputError:
    return InputError(
        f"The {what} has {count} {unit}; at most {limit} are allowed in one request. Split it into sentences."
    )
