"""The text front end: what is accepted, pieces and their ids, markup, and that a refusal says why."""

# ruff: noqa: RUF001

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.pipeline import MAX_CHARACTERS
from cosytriton_ensemble.text import TextFrontend
from cosytriton_export.tokenizer import save_tokenizer, tokenizer_from_files, write_tokenizer_files

TRANSCRIPT = "transcript of the reference audio"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token for each byte of UTF-8, and the special tokens of v3."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_files(folder)
    save_tokenizer(tokenizer_from_files(folder, "cosyvoice3"), folder / "tokenizer.json")
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def frontend(file: Path) -> TextFrontend:
    return TextFrontend(file)


def spoken(file: Path, segments: Sequence[Sequence[int]]) -> list[str]:
    tokenizer = Tokenizer.from_file(str(file))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in segments]


@pytest.mark.parametrize("text", ["Hello.", "你好世界", "naïve 42", "3", "OK 👍"])
def test_text_that_is_taken_as_it_is_becomes_one_id_for_each_byte(frontend: TextFrontend, text: str) -> None:
    (ids,) = frontend.segments(text, normalise=False)
    assert len(ids) == len(text.encode())


def test_text_is_normalised_and_gets_an_end_mark(frontend: TextFrontend) -> None:
    assert frontend.pieces("I have 3") == ["I have three."]
    assert frontend.pieces("我有 3 个,") == ["我有三个。"]
    assert frontend.pieces('He said "no."') == ['He said "no."']
    assert frontend.pieces("日本語の3") == ["日本語の3。"]


def test_no_token_is_added_at_the_begin_or_the_end(frontend: TextFrontend, file: Path) -> None:
    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    assert frontend.segments("ab.") == [[vocabulary["a"], vocabulary["b"], vocabulary["."]]]


@pytest.mark.parametrize(
    "text",
    [
        "so[laughter] [AA1]<strong>big</strong> [quick_breath]<laughter>ha</laughter> [ǎo] fun.",
        "你好[laughter]，<strong>世界</strong>[AA1][vocalized-noise]真[ǎo]好。",
    ],
)
def test_special_tokens_survive_normalisation_as_one_id(
    frontend: TextFrontend, file: Path, text: str
) -> None:
    assert "".join(frontend.pieces(text)) == text
    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    (ids,) = frontend.segments(text)
    for token in ("[laughter]", "[AA1]", "<strong>", "</strong>", "[ǎo]"):
        assert ids.count(vocabulary[token]) == 1, token


def test_text_with_control_tokens_is_one_piece_and_not_normalised(frontend: TextFrontend) -> None:
    text = "Say it 3 times. Slowly.<|endofprompt|>No 42. Yes"
    assert frontend.pieces(text) == [text]


def test_text_that_is_not_normalised_is_cut_only_where_it_is_too_long(frontend: TextFrontend) -> None:
    sentence = "It is 3.14 or so. "
    assert frontend.pieces(sentence * 8, normalise=False) == [sentence * 8]  # 144 tokens
    pieces = frontend.pieces(sentence * 20, normalise=False)
    assert len(pieces) > 1
    assert "".join(pieces) == sentence * 20
    assert all("3.14" in piece for piece in pieces)


@pytest.mark.parametrize("word", ["word ", "好", "aaa", "éé", "👍a", "[AA1]b"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_text_without_punctuation_is_cut_into_pieces_that_fit(
    frontend: TextFrontend, word: str, normalise: bool
) -> None:
    text = 500 * word
    pieces = frontend.pieces(text, normalise=normalise)
    assert "".join(pieces).rstrip("。. ") == text.strip()
    sizes = [len(ids) for ids in frontend.segments(text, normalise=normalise)]
    assert max(sizes) <= 150
    assert min(sizes[:-1]) > 70  # pieces are not needlessly small


def test_words_are_not_cut_where_there_are_blanks(frontend: TextFrontend) -> None:
    pieces = frontend.pieces("wonderful " * 100)
    assert all(set(piece.strip(" .").split()) == {"wonderful"} for piece in pieces)


def test_punctuation_alone_is_not_spoken(frontend: TextFrontend) -> None:
    assert frontend.pieces("Well. " + "?!. " * 60 + "Done.")[-1].strip().endswith("Done.")
    long = "一二三四五六七八九十" * 7 + "。"
    assert frontend.pieces(long + "！？" * 60 + "　" + long)[-1].strip().startswith("一")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<speak>Hello<break time='1s'/>you</speak>", "Hello you."),
        ('<?xml version="1.0"?><speak><p>One.</p><p>Two.</p></speak>', "One. Two."),
        ("The <emphasis level='strong'>red</emphasis> one.", "The red one."),
        ("<say-as interpret-as='date'>x</say-as> <strong>y</strong>.", "x <strong>y</strong>."),
        ("If a < b and c > d.", "If a < b and c > d."),
    ],
)
def test_tags_that_are_no_special_tokens_are_not_spoken(frontend: TextFrontend, text: str, left: str) -> None:
    assert " ".join("".join(frontend.pieces(text)).split()) == left


def test_tags_stay_when_asked(frontend: TextFrontend) -> None:
    text = "<speak>Hello<break/>you</speak>."
    assert frontend.pieces(text, markup="keep") == [text]


def test_a_prompt_is_normalised_and_not_cut(frontend: TextFrontend, file: Path) -> None:
    ids = frontend.prompt("I have 3. Dogs", TRANSCRIPT)
    assert spoken(file, [ids]) == ["I have three. Dogs"]
    assert spoken(file, [frontend.prompt("I have 3", TRANSCRIPT, normalise=False)]) == ["I have 3"]
    assert frontend.prompt("", TRANSCRIPT) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The text is empty"),
        (" \n\t", "The text is empty"),
        ("<speak> </speak>", "The text is empty"),
        ("👍🎉", "holds no letter and no digit"),
        ("?!...", "holds no letter and no digit"),
        ("a" * (MAX_CHARACTERS + 1), f"has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS}"),
    ],
)
def test_unspeakable_text_is_refused_with_the_reason(frontend: TextFrontend, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        frontend.segments(text)


def test_a_prompt_is_refused_by_its_name(frontend: TextFrontend) -> None:
    with pytest.raises(InputError, match=f"The {TRANSCRIPT} has 200 text tokens; at most 150"):
        frontend.prompt("a" * 200, TRANSCRIPT)
    with pytest.raises(InputError, match=rf"The {TRANSCRIPT} '\?!' holds no letter"):
        frontend.prompt("?!", TRANSCRIPT)


def test_the_number_of_characters_is_a_setting(file: Path) -> None:
    with pytest.raises(InputError, match="has 11 characters; at most 10"):
        TextFrontend(file, max_characters=10).segments("Hello world")


@pytest.mark.parametrize(
    "sentence",
    [
        "The quick brown fox jumps over 3 lazy dogs, and then it sleeps. ",
        "今天来了3位客人，天气很好，我们去公园。",
    ],
)
def test_ten_thousand_characters_are_cut_in_seconds(frontend: TextFrontend, sentence: str) -> None:
    text = (sentence * 10_000)[:10_000]
    numbered = "".join(c if c != "3" else str(2 + i % 997) for i, c in enumerate(text))
    start = time.thread_time()
    pieces = frontend.pieces(numbered)
    assert time.thread_time() - start < 5  # one here; what grows with the square would take minutes
    assert len("".join(pieces)) > 9_900
