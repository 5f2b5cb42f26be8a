"""SSML-like markup: the models know no tags but their special tokens, so other tags must not be spoken."""

from __future__ import annotations

import re
from collections.abc import Collection

# A name, attributes with quoted values, and no "<" inside: "a < b and c > d" is no tag.
_ATTRIBUTE = r"""\s+[\w:.-]+\s*=\s*(?:"[^"<]*"|'[^'<]*')"""
_TAG = re.compile(rf"</?([A-Za-z][\w:.-]*)(?:{_ATTRIBUTE})*\s*/?>|<\?xml[^<>]*\?>")
_UNFINISHED_TAG = re.compile(r"<(?:[/?]?[A-Za-z][^<>]*|[/?])?$")
# Version 1 has no special tokens for these: it learned them letter by letter.
_LEARNED = {"strong", "laughter", "endofprompt"}
_PAUSES = {"break", "p", "s", "br"}  # words on both sides stay apart
_LONGEST_TAG = 500  # characters: of a stream, no more is held back


def strip_markup(text: str, special_tokens: Collection[str]) -> str:
    """Remove every tag that the models have not learned; what stands between tags stays."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or ""
        if match[0] in special_tokens or name in _LEARNED:
            return match[0]
        return " " if name.lower() in _PAUSES else ""

    return _TAG.sub(replace, text)


def unfinished_tag(text: str) -> int:
    """Where a tag begins that the end of `text` cuts; the length of `text` when there is none."""
    match = _UNFINISHED_TAG.search(text, max(0, len(text) - _LONGEST_TAG))
    return match.start() if match else len(text)
