"""Numbers, dates, units and amounts as they are said: the rules of the package `wetext`, with faults mended.

`wetext` (Apache-2.0) is what the official front end uses; its rules are finite-state transducers, about 40 MB
of memory and 0.3 s, loaded with the first text that needs them. Without the package no rule is applied.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, Literal

from cosytriton_ensemble.text.numbers import cardinal
from cosytriton_ensemble.text.split import sentences

log = logging.getLogger(__name__)

_CURRENCIES = {"$": ("dollars", "美元"), "£": ("pounds", "英镑"), "€": ("euros", "欧元"), "¥": ("yen", "元")}
_SIGNS = "".join(_CURRENCIES)
_GROUPED = r"\d{1,3}(?:,\d{3})+"

# wetext puts a backslash before these; they are never given to it.
_ESCAPED = re.compile(r'(["\\])')
# It takes 50 us for each character and more in long texts: it is given what needs it, with its surroundings.
_LONGEST_WORD = 60
_PART = re.compile(r".{1,300}(?:[\s，。、,]|$)|.{1,300}")  # noqa: RUF001

# ---- English: see `_english` ------------------------------------------------------------------------
_PLAIN_WORD = re.compile(r"""(?:[^\W\d_]|[',;:?!"()<>\[\]-])*""")
_SURROUNDINGS = 2  # words: "the 5th of May", "3 million dollars"
_MILLIONS = re.compile(rf"([{_SIGNS}]?)({_GROUPED})(\.\d+)? ?([mbt]r?illion)\b")
_SIGN_BEHIND = re.compile(r"(?<![\d.,])(\d[\d,.]*\d|\d) ?([€£])")
_YEAR_1000 = re.compile(r"(?<![\w.,-])1(00\d)(?![\w]|[.,-]\d)")
_THOUSAND_AHEAD = re.compile(rf"(?<!\S)(?=[(\[-]*(?:(?:[A-Z]{{2}})?[{_SIGNS}]1,?\d{{3}}|1,\d{{3}})(?!,?\d))")
_LEADING_THOUSAND = re.compile(r"^(\W*(?:negative )?)thousand\b")
_BARE_THOUSAND = re.compile(r"\b(to |-|and )thousand\b")

# ---- Chinese ----------------------------------------------------------------------------------------
_ZH_GROUPED = re.compile(rf"(?<![\d,.]){_GROUPED}(?!\d)")
_ZH_AMOUNT = re.compile(rf"(?:US)?([{_SIGNS}]) ?(\d+(?:\.\d+)?)( ?[十百千]?[万亿]+)?(?:[美欧]?元|英镑)?")
_ZH_NUMBERS = re.compile(r"(?:.{0,6}\d)+.{0,6}")


def speak(text: str, language: Literal["zh", "en"]) -> str:
    """Write `text` as it is said; blanks at its ends stay."""
    if language == "zh":
        return _ZH_NUMBERS.sub(lambda match: _chinese(match[0]), text)
    return "".join(map(_english_sentence, sentences(text)))


def _english_sentence(text: str) -> str:
    """Normalise words with digits, signs or points inside the sentence, together with their neighbours."""
    words = text.split(" ")
    plain = [bool(_PLAIN_WORD.fullmatch(word)) for word in words]
    plain[-1] = bool(_PLAIN_WORD.fullmatch(words[-1].rstrip(".")))
    near = [not all(plain[max(0, i - _SURROUNDINGS) : i + _SURROUNDINGS + 1]) for i in range(len(words))]
    kinds = [near[i] and len(word) <= _LONGEST_WORD for i, word in enumerate(words)]
    runs = groupby(zip(kinds, words, strict=True), key=lambda pair: pair[0])
    parts = [(kind, " ".join(word for _, word in run)) for kind, run in runs]
    return " ".join(_english(part) if kind else part for kind, part in parts)


def _chinese(text: str) -> str:
    """The rules cut "1,280" at the comma and "$500万" inside the number: signs become words behind it."""
    text = _ZH_GROUPED.sub(lambda match: match[0].replace(",", ""), text.replace("￥", "¥"))
    text = _ZH_AMOUNT.sub(lambda m: m[2] + (m[3] or "").strip() + _CURRENCIES[m[1]][1], text)
    return _by_rules(text, "zh")


def _english(text: str) -> str:
    """The rules leave out the "one" of 1,000 to 1,999 ("thousand two hundred and eighty dollars").

    So the text is cut before each such number, and a part that then begins with "thousand" gets its "one".
    Other faults: "$2,500 million" is cut at the comma, "5€" has no reading, and 1000 to 1009 are read as
    years ("ten hundred").
    """
    text = _MILLIONS.sub(_say_millions, text)
    text = _SIGN_BEHIND.sub(r"\2\1", text)
    text = _YEAR_1000.sub(r"1,\1", text)
    return "".join(_one_thousand(part) for part in _THOUSAND_AHEAD.split(text))


def _say_millions(match: re.Match[str]) -> str:
    sign, number, fraction, scale = match.groups()
    words = [cardinal(number.replace(",", "")), *(["point"] if fraction else [])]
    words += [cardinal(digit) for digit in (fraction or "")[1:]]
    return " ".join([*words, scale, *([_CURRENCIES[sign][0]] if sign else [])])


def _one_thousand(text: str) -> str:
    spoken = _LEADING_THOUSAND.sub(r"\1one thousand", _by_rules(text, "en")) if text else ""
    return spoken if "thousand" in text else _BARE_THOUSAND.sub(r"\1one thousand", spoken)


def _by_rules(text: str, language: Literal["zh", "en"]) -> str:
    return "".join(
        part if _ESCAPED.fullmatch(part) else _apply(part, language)
        for whole in _ESCAPED.split(text)
        for part in _PART.findall(whole)
    )


def _apply(text: str, language: Literal["zh", "en"]) -> str:
    """Apply the rules; where they find no reading, to each word alone, and a word without one stays."""
    core = text.strip()
    spoken = _reading(core, language)
    if spoken is None:
        spoken = " ".join(_reading(word, language) or word for word in core.split())
    start = text.index(core)
    return text[:start] + spoken + text[start + len(core) :]


@lru_cache(maxsize=10_000)
def _reading(text: str, language: Literal["zh", "en"]) -> str | None:
    """What the rules make of `text`; None when they accept no such text or are missing."""
    rules = _rules(language)
    try:
        return rules(text) or None if rules and text else None
    except AssertionError:  # wetext's way to say that its rules accept no such text
        return None


@cache
def _rules(language: Literal["zh", "en"]) -> Callable[[str], str] | None:
    try:
        import wetext
    except ImportError:
        log.warning("The package wetext is missing: numbers are not normalised. Install cosytriton[serve].")
        return None
    options: dict[str, Any] = {"remove_erhua": False} if language == "zh" else {}
    normaliser = wetext.Normalizer(lang=language, operator="tn", **options)
    return lambda text: str(normaliser.normalize(text))
