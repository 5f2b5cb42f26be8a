"""English numerals in words, for what no normalisation rule has spelled."""

from __future__ import annotations

import re

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = ("", " thousand", " million", " billion", " trillion")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
_DIGITS = re.compile(r"(?<!\.)[0-9]+")  # what follows a point is read digit by digit
_FRACTION = re.compile(r"\.([0-9]+)")


def cardinal(digits: str) -> str:
    """Say the number `digits` ("1280": "one thousand two hundred and eighty").

    Leading zeros and more than fifteen digits are read one by one, as in a telephone number.
    """
    if len(digits) > 3 * len(_SCALES) or (digits.startswith("0") and len(digits) > 1):
        return " ".join(_ONES[int(digit)] for digit in digits)
    number = int(digits)
    if number < 100:
        return _below_hundred(number)
    words: list[str] = []
    for power in reversed(range(len(_SCALES))):
        group = number // 1000**power % 1000
        if group:
            words.append(_below_thousand(group, "and " if words and not power else "") + _SCALES[power])
    return " ".join(words)


def spell_numbers(text: str) -> str:
    """Replace the ASCII digits of `text` by words; words that would touch letters keep a blank to them."""
    text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    text = _FRACTION.sub(lambda match: " point " + " ".join(_ONES[int(digit)] for digit in match[1]), text)

    def spell(match: re.Match[str]) -> str:
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        return f"{' ' * before.isalpha()}{cardinal(match[0])}{' ' * after.isalpha()}"

    return _DIGITS.sub(spell, text)


def _below_thousand(number: int, link: str) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return link + _below_hundred(rest)
    return f"{_ONES[hundreds]} hundred" + (f" and {_below_hundred(rest)}" if rest else "")


def _below_hundred(number: int) -> str:
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
