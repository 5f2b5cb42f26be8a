"""Pieces against a second implementation, character by character, on random texts; nothing is lost."""

# ruff: noqa: RUF001

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from cosytriton_ensemble.text.language import Language, language_of
from cosytriton_ensemble.text.split import Splitter, complete_sentences, sentences

NO_TOKENS = re.compile("(?!)")
CLOSERS = "\"'”’»)]}）】」』》〉"
MARKS = {"zh": "。？！；：、.?!;؟۔।", "en": ".?!;:。？！；؟۔।"}
ABBREVIATIONS = ("Mr", "Mrs", "Ms", "Dr", "Prof", "St", "Jr", "Sr", "Mt", "vs", "e.g", "i.e", "No", "cf")


def words(text: str) -> int:
    """A count that is no number of characters: words and marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def reference_sentences(text: str, marks: str) -> list[str]:
    found, start, i = [], 0, 0
    while i < len(text):
        if text[i] not in marks:
            i += 1
            continue
        first = i
        while i < len(text) and text[i] in marks:
            i += 1
        while i < len(text) and text[i] in CLOSERS:
            i += 1
        following = text[i] if i < len(text) else ""
        before = text[:first].replace("(", " ").replace('"', " ").replace("'", " ").split(" ")[-1]
        initial = bool(re.search(r"(^|\.|\s)[A-Z]$", before))
        ending = any(before == a or before.endswith("." + a) for a in ABBREVIATIONS)
        if text[first:i] in (".", ":") and following and following.isascii() and following != " ":
            continue
        if text[first:i] == "." and following == " " and (initial or ending):
            continue
        found.append(text[start:i])
        start = i
    return found + [text[start:]] * (start < len(text))


def reference_pieces(text: str, language: Language, count: Callable[[str], int]) -> list[str]:
    units = len if language == "zh" else count
    done, current = [], ""
    for sentence in reference_sentences(text, MARKS[language]):
        if units(current) > 60 and units(current + sentence) > 80:
            done.append(current)
            current = ""
        current += sentence
    if done and 0 < units(current) < 20:
        return [*done[:-1], done[-1] + current]
    return [*done, current] if current else done


def random_text(language: Language, seed: int) -> str:
    generator = random.Random(seed)
    parts = {
        "zh": [
            "今天",
            "天气很好",
            "我们去公园",
            "3.14",
            "3",
            "OK",
            "，",
            "。",
            "！？",
            "、",
            "：",
            ".",
            "；”",
            "“",
        ],
        "en": ["the", "house", "3.14", "Dr", "e.g", "U.S", "said", "x", "10:30", "a.b", '"', " (", ")"]
        + [" "] * 9
        + [". "] * 3
        + [".", "?!", "...", ": ", ", ", "; ", '."', "."],
    }
    return "".join(generator.choice(parts[language]) for _ in range(generator.randrange(1, 900)))


@pytest.mark.parametrize("language", ["zh", "en"])
def test_pieces_are_those_of_the_reference(language: Language) -> None:
    splitter = Splitter(words, limit=10_000, keep=NO_TOKENS)
    for seed in range(400):
        text = random_text(language, seed)
        assert splitter.pieces(text, language) == reference_pieces(text, language, words), seed


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("limit", [3, 20, 90])
def test_pieces_keep_every_character_and_the_limit(language: Language, limit: int) -> None:
    splitter = Splitter(words, limit, keep=NO_TOKENS)
    for seed in range(100):
        text = random_text(language, seed)
        pieces = splitter.pieces(text, language)
        assert "".join(pieces) == text
        assert all(words(piece) <= limit for piece in pieces)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It is 3.14. So.", ["It is 3.14.", " So."]),
        ("At 10:30: go!", ["At 10:30:", " go!"]),
        ("See example.com/a?b or a@b.org. Yes", ["See example.com/a?", "b or a@b.org.", " Yes"]),
        ("Dr. Smith met J. K. Doe. He left.", ["Dr. Smith met J. K. Doe.", " He left."]),
        ("The U.S. economy, e.g. this. End", ["The U.S. economy, e.g. this.", " End"]),
        ('He said "no." Then "yes!" Done', ['He said "no."', ' Then "yes!"', " Done"]),
        ("Wait... what?! Oh.", ["Wait...", " what?!", " Oh."]),
        ("你好。”他说：“走！”", ["你好。”", "他说：", "“走！”"]),
        ("圆周率是3.14。好.好", ["圆周率是3.14。", "好.", "好"]),
    ],
)
def test_where_a_sentence_ends(text: str, parts: list[str]) -> None:
    assert sentences(text, MARKS["zh" if "。" in text else "en"]) == parts


def test_a_sentence_at_the_end_of_a_growing_text_is_not_complete() -> None:
    assert complete_sentences("It is 3.") == 0
    assert complete_sentences("It is 3.14") == 0
    assert complete_sentences("It is 3. ") == len("It is 3.")
    assert complete_sentences("One. Two! Three.") == len("One. Two!")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Hello 你好", "zh"),
        ("列奥纳多・达芬奇", "zh"),
        ("「优の良品」是一个很有名的零食品牌", "zh"),
        ("東京都知事選挙の結果です", "ja"),
        ("カタカナ", "ja"),
        ("안녕하세요", "ko"),
        ("大韓民國은 민주공화국이다", "ko"),
        ("Grüß Gott", "en"),
        ("1280", "en"),
        ("Привет, мир", "other"),
        ("नमस्ते", "other"),
    ],
)
def test_the_language_of_a_text(text: str, language: Language) -> None:
    assert language_of(text) == language
