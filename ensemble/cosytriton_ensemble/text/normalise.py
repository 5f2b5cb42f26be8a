"""Text as it is said: the cleanups of the official front end around the rules of `spoken`."""

from __future__ import annotations

import re

from cosytriton_ensemble.text.language import Language
from cosytriton_ensemble.text.numbers import spell_numbers
from cosytriton_ensemble.text.spoken import speak

_BLANKS = re.compile(r"[\s\x00-\x1f\x7f\u200b\ufeff]+")
_ZH_BLANK = re.compile(r"(?<![!-~]) | (?![!-~])")  # one that has no ASCII character on one of its sides
_ZH_DASH = re.compile(r"(?<!\d) - | - (?!\d)")  # 3 - 5 is a subtraction
_ZH_POINT = re.compile(r"(?<![A-Za-z0-9])\.|\.(?![A-Za-z0-9])")  # not the one of 3.14 or example.com
_ZH_REPLACED = str.maketrans(
    {"²": "平方", "³": "立方", "（": "", "）": "", "【": "", "】": "", "`": ""}  # noqa: RUF001
)
_EN_REPLACED = str.maketrans({"²": " squared", "³": " cubed"})


def is_marked_up(text: str) -> bool:
    """Whether `text` names tokens like <|endofprompt|>: then it is taken as it is, as officially."""
    return "<|" in text and "|>" in text


def normalise(text: str, language: Language, special_tokens: re.Pattern[str]) -> str:
    """Normalise `text`; in a language other than Chinese and English only blanks are tidied.

    What `special_tokens` matches stays as it is.
    """
    text = _BLANKS.sub(" ", text).strip()
    if language == "zh":
        return _clean_chinese(_speak_around(_ZH_DASH.sub("，", text), special_tokens, chinese=True))  # noqa: RUF001
    if language == "en":
        return _speak_around(text, special_tokens, chinese=False).translate(_EN_REPLACED)
    return text


def _speak_around(text: str, special_tokens: re.Pattern[str], *, chinese: bool) -> str:
    spoken, start = [], 0
    for match in (*special_tokens.finditer(text), None):
        part = text[start : match.start() if match else len(text)]
        spoken.append(speak(part, "zh") if chinese else spell_numbers(speak(part, "en")))
        if match:
            spoken.append(match[0])
            start = match.end()
    return "".join(spoken)


def _clean_chinese(text: str) -> str:
    text = _ZH_BLANK.sub("", text).translate(_ZH_REPLACED)
    text = _ZH_POINT.sub("。", text)
    return text.replace("——", " ").strip()
