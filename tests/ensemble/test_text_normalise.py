"""Numbers, dates and amounts in words, the faults of the rules mended, and what must stay as it is."""

# ruff: noqa: RUF001

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator

import pytest

from cosytriton_ensemble.text import spoken
from cosytriton_ensemble.text.language import language_of
from cosytriton_ensemble.text.normalise import normalise
from cosytriton_ensemble.text.numbers import cardinal, spell_numbers

TOKENS = re.compile(r"\[laughter\]|\[AA1\]|</?strong>")


def say(text: str) -> str:
    return normalise(text, language_of(text), TOKENS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("今天是2024年5月1日。", "今天是二零二四年五月一日。"),
        ("温度25.5℃，涨了100%。", "温度二十五点五摄氏度，涨了百分之一百。"),
        ("电话13812345678。", "电话幺三八幺二三四五六七八。"),
        ("今天 3 个 apple pie", "今天三个apple pie"),
        ("面积10 m²，体积x³", "面积十平方米，体积x立方"),
        ("你好.再见.", "你好。再见。"),
        ("访问 www.example.com 吧", "访问www.example.com吧"),
        ("北京 - 上海，3 - 5", "北京，上海，三减五"),
        ("（你好）【世界】`好`——完", "你好世界好 完"),
        ("价格$1,280.50和¥1,280.50", "价格一千二百八十点五零美元和一千二百八十点五零元"),
        ("共$5，€ 2.5亿，£3英镑，¥1,280.50元", "共五美元，二点五亿欧元，三英镑，一千二百八十点五零元"),
        ("他有$500万，共12,345,678人", "他有五百万美元，共一千二百三十四万五千六百七十八人"),
    ],
)
def test_chinese(text: str, expected: str) -> None:
    assert say(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "On May 1, 2024 at 10:30 it was 5°C.",
            "On May one, twenty twenty four at ten thirty it was five degrees Celsius.",
        ),
        ("Dr. Smith ate 1/2 cup, 5 kg.", "doctor Smith ate one half cup, five kilograms."),
        ('He said "3 \\ 4".', 'He said "three \\ four".'),
        ("two\n\nlines,  3\tblanks", "two lines, three blanks"),
        ("H2O and MP3", "H two O and MP three"),
        ("Call +1 555", "Call +one five hundred and fifty five"),
        ("Nothing to change here; it's fine: don't!", "Nothing to change here; it's fine: don't!"),
        ("m² and 10³", "m squared and ten cubed"),
    ],
)
def test_english(text: str, expected: str) -> None:
    assert say(text) == expected


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("$1,280.50", "one thousand two hundred and eighty point five dollars"),
        ("£1,001.01", "one thousand and one point oh one pounds"),
        ("US$1,280", "one thousand two hundred and eighty us dollars"),
        ("1,280€", "one thousand two hundred and eighty euros"),
        ("(1,999)", "(one thousand nine hundred and ninety nine)"),
        ("-$1,200", "-one thousand two hundred dollars"),
        ("900-1,100", "nine hundred to one thousand one hundred"),
        ("room five 1,200", "room five one thousand two hundred"),
        ("a thousand 1,200", "a thousand one thousand two hundred"),
        ("$2,500 million", "two thousand five hundred million dollars"),
        ("$1,500.5 billion", "one thousand five hundred point five billion dollars"),
        ("1000 or 1005", "one thousand or one thousand and five"),
        ("1066", "ten sixty six"),
    ],
)
def test_english_amounts_keep_their_thousand(amount: str, expected: str) -> None:
    assert say(f"It is {amount} now.") == f"It is {expected} now."


def test_english_numbers_are_those_of_another_implementation() -> None:
    """`wetext` with its faults mended against `cardinal`, which knows no rules."""
    generator = random.Random(0)
    numbers = [
        *range(1_000, 2_100, 9),
        *(generator.randrange(10 ** generator.randrange(3, 9)) for _ in range(80)),
    ]
    for number in numbers:
        expected = cardinal(str(number)).replace(" and ", " ")
        for text in (f"It is {number:,} now.", f"All {number:,} people and more."):
            assert f" {expected} " in say(text).replace(" and ", " "), text


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        ("0", "zero"),
        ("13", "thirteen"),
        ("40", "forty"),
        ("101", "one hundred and one"),
        ("1280", "one thousand two hundred and eighty"),
        ("1000001", "one million and one"),
        ("1100000", "one million one hundred thousand"),
        ("007", "zero zero seven"),
        ("1" * 16, "one " * 15 + "one"),
    ],
)
def test_cardinals(digits: str, expected: str) -> None:
    assert cardinal(digits) == expected


def test_digits_among_letters_are_spelled_with_blanks() -> None:
    assert (
        spell_numbers("x2y 1,280.50 3") == "x two y one thousand two hundred and eighty point five zero three"
    )


@pytest.mark.parametrize("text", ["こんにちは 3.14 人", "안녕 3 (넷)", "Привет 3 мира", "日本語の3 - 4（）"])
def test_other_languages_pass_through(text: str) -> None:
    assert say(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A [AA1] 3 [laughter]<strong>4</strong>", "A [AA1] three [laughter]<strong>four</strong>"),
        ("我[AA1]有3[laughter]个<strong>4</strong>", "我[AA1]有三[laughter]个<strong>四</strong>"),
    ],
)
def test_special_tokens_are_not_read(text: str, expected: str) -> None:
    assert say(text) == expected


def test_random_text_keeps_its_letters() -> None:
    generator = random.Random(0)
    alphabet = "abcXYZ,.:;!?'\"\\-()&@#[]{}<>|~\x00\x01\x85 \n\t  éüñßПр中文你好，。“”😀ا३ก"
    for _ in range(400):
        text = "".join(generator.choice(alphabet) for _ in range(generator.randrange(60)))
        kept = iter(say(text).lower())
        assert all(letter in kept for letter in text.lower() if letter.isalpha()), text  # in this order


@pytest.fixture
def _without_wetext(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        spoken._rules.cache_clear()
        spoken._reading.cache_clear()

    forget()
    monkeypatch.setitem(sys.modules, "wetext", None)
    yield
    forget()


@pytest.mark.usefixtures("_without_wetext")
def test_without_the_rules_the_cleanups_remain() -> None:
    assert (
        say("I paid $1,280.50 for 3.")
        == "I paid $one thousand two hundred and eighty point five zero for three."
    )
    assert say("我有 3 个（苹果）.") == "我有3个苹果。"
