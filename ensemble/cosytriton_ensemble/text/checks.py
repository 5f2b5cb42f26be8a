"""What is accepted as text; a refusal names the text, the value and the limit."""

from __future__ import annotations

from cosytriton_ensemble.errors import InputError


def is_speakable(text: str) -> bool:
    """Whether there is a letter or a digit in `text`."""
    return any(character.isalnum() for character in text)


def check_speakable(text: str, what: str) -> None:
    """Raise `InputError` for text that is empty or without anything to say."""
    if not text.strip():
        raise InputError(f"The {what} is empty; give at least one word.")
    if not is_speakable(text):
        raise InputError(
            f"The {what} {text[:40]!r} holds no letter and no digit, so there is nothing to say."
        )


def check_length(what: str, count: int, unit: str, limit: int) -> None:
    """Raise `InputError` if `count` exceeds `limit`."""
    if count > limit:
        raise InputError(
            f"The {what} has {count} {unit}; at most {limit} are allowed. Shorten it or send it in parts."
        )
