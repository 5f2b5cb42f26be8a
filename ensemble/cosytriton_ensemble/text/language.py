"""What script a text is written in, which decides how it is normalised and how it is measured."""

from __future__ import annotations

import re
from typing import Literal

Language = Literal["zh", "ja", "ko", "en", "other"]

_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")
_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa\uff66-\uff9d]")  # without ・ and ー, which Chinese names use
_HANGUL = re.compile("[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]")
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")
# Japanese and Korean text mixes in ideographs, Chinese text quotes foreign words: one in ten decides.
_SHARE = 10


def language_of(text: str) -> Language:
    """Tell the language of `text`: "other" has letters, but no Latin ones; a text without letters is "en".

    Chinese is what holds an ideograph, as in the official front end, which takes Japanese with ideographs for
    Chinese and all the rest for English. Latin text of any language counts as English.
    """
    ideographs = len(_IDEOGRAPH.findall(text))
    for language, letters in (("ja", _KANA), ("ko", _HANGUL)):
        found = len(letters.findall(text))
        if found and found * _SHARE >= ideographs:
            return "ja" if language == "ja" else "ko"
    if ideographs:
        return "zh"
    if _LATIN.search(text) or not any(character.isalpha() for character in text):
        return "en"
    return "other"


def counts_characters(language: Language) -> bool:
    """Whether a text is measured in characters; in other languages it is measured in text tokens."""
    return language in ("zh", "ja", "ko")
