"""Text that arrives in parts: together the ids of the whole text, wherever it is cut, and soon."""

# ruff: noqa: RUF001

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.text import SentencePieces, TextFrontend, TextPieces
from cosytriton_export.tokenizer import save_tokenizer, tokenizer_from_files, write_tokenizer_files
from cosytriton_export.whisper_tokenizer import whisper_tokenizer

FRAGMENTS = [
    *("Hello", ", ", "I'll", "I", "'", "ll", "'s", " don't", " the", "  ", "   ", "\n", "\r\n", "\t", " "),
    *("世界", "你好", "，", "。", "！", "😀", "👩‍👩‍👧", "e\u0301", "\u0301", "\u0323\u0307", "x"),
    *("한", "\u1112\u1161\u11ab", "\u1161", "가", "ก็", "नी", "ি", "\u00a0", "\u3000", "ß", "Ω"),
    *(
        "[laughter]",
        "[laugh",
        "[",
        "]",
        "<strong>",
        "</strong>",
        "<",
        "</",
        "<|",
        "|>",
        "[AA1]",
        "[i]",
        "[ǎo]",
    ),
    *("<|im_end|>", "<|endofprompt|>", "<|0.02|>", "<|en|>", "3.14", "42", " 7", "...", "?!", "--", " - "),
]
TAGS = ["<break time='1s'/>", "<speak>", "</speak>", "< b", ">", "a<b>c", "<a x", "/>", "<p"]


@pytest.fixture(scope="module", params=["cosyvoice1", "cosyvoice2", "cosyvoice3"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of each family; that of v2 and v3 with merges that cross what may be cut."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "cosyvoice1":
        tokenizer = whisper_tokenizer()
    else:
        pairs = ["H e", "He l", "l l", "' l", "' ll", "Ġ t", "Ġt h", "Ġth e", "Ġ Ġ", "Ġ ĠĠ", "- -", ". ."]
        write_tokenizer_files(folder, [(a, b) for a, b in map(str.split, pairs)])
        tokenizer = tokenizer_from_files(folder, request.param)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def parts_of(text: str, generator: random.Random) -> list[str]:
    cuts = sorted(generator.randrange(len(text) + 1) for _ in range(generator.randrange(len(text) + 2)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def streamed(stream: TextPieces, parts: list[str]) -> list[int]:
    return [*itertools.chain.from_iterable(map(stream.feed, parts)), *stream.end()]


def test_the_ids_are_those_of_the_whole_text(file: Path) -> None:
    frontend, tokenizer = TextFrontend(file), Tokenizer.from_file(str(file))
    generator = random.Random(0)
    for _ in range(800):
        text = "a" + "".join(generator.choice(FRAGMENTS) for _ in range(generator.randrange(1, 14)))
        parts = parts_of(text, generator)
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert streamed(frontend.stream("keep"), parts) == whole, parts


def test_tags_are_removed_wherever_they_are_cut(file: Path) -> None:
    frontend = TextFrontend(file)
    generator = random.Random(1)
    for _ in range(300):
        text = "a" + "".join(
            generator.choice(FRAGMENTS + 3 * TAGS) for _ in range(generator.randrange(1, 14))
        )
        parts = parts_of(text, generator)
        assert streamed(frontend.stream(), parts) == streamed(frontend.stream(), [text]), parts
    assert streamed(frontend.stream(), [*"<speak>Hi<br/>you</speak>"]) == streamed(
        frontend.stream(), ["Hi you"]
    )


def test_ids_come_with_the_word_behind_them(file: Path) -> None:
    frontend, tokenizer = TextFrontend(file), Tokenizer.from_file(str(file))
    stream = frontend.stream()
    assert tokenizer.decode(stream.feed("Hello the wo")) == "Hello the"
    assert tokenizer.decode(stream.feed("rld, good")) == " world,"
    assert tokenizer.decode(stream.feed(" ")) == " good"
    assert stream.feed("你") == []
    assert "你好" in tokenizer.decode(stream.feed("好，再见"))
    assert stream.feed("<|endoftext|>")[-1] == tokenizer.token_to_id("<|endoftext|>")
    assert stream.end() == []


def test_what_is_held_back_can_be_asked_for(file: Path) -> None:
    frontend = TextFrontend(file, max_characters=20)
    stream = frontend.stream()
    first = stream.feed("One two.") + stream.flush()
    assert first == streamed(frontend.stream(), ["One two."])
    assert stream.flush() == []
    stream.feed(" ?!")
    stream.flush()
    assert stream.end() == []  # something was said
    with pytest.raises(InputError, match="has 21 characters"):
        stream.feed("ten chars.")


def test_a_word_without_end_is_not_held_back_for_ever(file: Path) -> None:
    stream = TextFrontend(file).stream()
    early = [token for _ in range(40) for token in stream.feed("好" * 50)]
    late = stream.end()
    assert len(late) < len(early)
    assert Tokenizer.from_file(str(file)).decode(early + late) == "好" * 2000


def test_a_stream_refuses_what_a_text_may_not_be(file: Path) -> None:
    with pytest.raises(InputError, match="The text is empty"):
        TextFrontend(file).stream().end()
    stream = TextFrontend(file, max_characters=5).stream()
    stream.feed("?!")
    with pytest.raises(InputError, match="The text has 6 characters; at most 5"):
        stream.feed("abcd")
    stream = TextFrontend(file).stream()
    stream.feed("?!")
    with pytest.raises(InputError, match="nothing to say"):
        stream.end()


def sentence_stream(text: str, generator: random.Random | None = None) -> list[str]:
    stream = SentencePieces(max_characters=10_000)
    parts = parts_of(text, generator) if generator else [*text]
    return [*itertools.chain.from_iterable(map(stream.feed, parts)), *stream.end()]


def test_sentences_are_given_whole() -> None:
    text = 'It is 3.14. "Really?!" Dr. Who asked... 你好。”再见！ ?! Yes'
    expected = ["It is 3.14.", ' "Really?!"', " Dr. Who asked...", " 你好。”", "再见！", " Yes"]
    generator = random.Random(0)
    assert sentence_stream(text) == expected
    assert all(sentence_stream(text, generator) == expected for _ in range(200))


def test_a_sentence_comes_with_the_first_character_behind_it() -> None:
    stream = SentencePieces(max_characters=100)
    assert stream.feed("One. Two") == ["One."]
    assert stream.feed(".") == []
    assert stream.feed(" ") == [" Two."]
    assert stream.end() == []


def test_a_sentence_without_end_is_given_in_parts() -> None:
    parts = sentence_stream("word " * 700)
    assert "".join(parts) == "word " * 700
    assert max(map(len, parts)) < 1_100


def test_sentences_refuse_what_a_text_may_not_be() -> None:
    with pytest.raises(InputError, match="The text is empty"):
        SentencePieces(max_characters=9).end()
    with pytest.raises(InputError, match="at most 9 are allowed"):
        SentencePieces(max_characters=9).feed("1234567890")


def sentence_ids(frontend: TextFrontend, parts: list[str]) -> list[tuple[list[int], bool]]:
    stream = frontend.sentence_ids()
    return [*itertools.chain.from_iterable(map(stream.feed, parts)), *stream.end()]


@pytest.mark.parametrize("cut", [1, 3, 7, 100])
def test_sentence_borders_do_not_depend_on_how_the_text_is_cut(file: Path, cut: int) -> None:
    """In a part or between two, and not after "3." or "Dr."; blanks at the end are no sentence."""
    frontend, tokenizer = TextFrontend(file), Tokenizer.from_file(str(file))
    sentences = ["It costs 3.14 today.", " Dr. Smith knows!", " 好的。", " And the rest"]
    text = "".join(sentences) + " \n"
    given = sentence_ids(frontend, [text[i : i + cut] for i in range(0, len(text), cut)])
    ended: list[list[int]] = [[]]
    for ids, ends in given:
        ended[-1] += ids
        if ends:
            ended.append([])
    words = [tokenizer.decode(ids, skip_special_tokens=False) for ids in ended if ids]
    assert [said.strip() for said in words] == [sentence.strip() for sentence in sentences]


def test_what_says_nothing_is_no_sentence(file: Path) -> None:
    frontend, tokenizer = TextFrontend(file), Tokenizer.from_file(str(file))
    ids = [i for ids, _ in sentence_ids(frontend, ["Hello.", " ", "\n", "!?", " "]) for i in ids]
    assert tokenizer.decode(ids, skip_special_tokens=False).strip() == "Hello."
    for parts in ([], [" "], ["?!", "..."]):
        with pytest.raises(InputError, match=r"empty|nothing to say"):
            sentence_ids(frontend, parts)
