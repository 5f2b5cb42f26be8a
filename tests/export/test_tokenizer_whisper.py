"""Whisper's tokenizer against `tiktoken` with the same ranks: the same ids for any text."""

from __future__ import annotations

import dataclasses
import hashlib
import lzma
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from cosytriton_ensemble.families import FAMILIES
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hyperyaml import Config
from cosytriton_export.special_tokens import WHISPER
from cosytriton_export.tokenizer import build_tokenizer
from cosytriton_export.whisper_tokenizer import RANKS, read_ranks, whisper_tokenizer

# As in whisper.tokenizer.
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TEXTS = [
    "Hello, I'm the server's voice. It's 3.14 o'clock in 2024!",
    "I'LL we've x' 'll",
    "你好，世界！今天是２０２４年。",  # noqa: RUF001
    "🎉 emoji 👩‍👩‍👧 family",
    "  two  blanks\n\nlines\r\n\ttabs   ",
    "Ünïcödé e\u0301 naïve café",
    "こんにちは 안녕하세요 Привет हिन्दी ไทย العربية",
    "在<strong>勇气</strong>[laughter]<|endoftext|><|zh|><|0.02|><|30.00|><|yue|><|nope|>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return whisper_tokenizer()


@pytest.fixture(scope="module")
def reference() -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = read_ranks()
    special = {token: len(ranks) + number for number, token in enumerate(WHISPER)}
    return tiktoken.Encoding(
        "whisper", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=51_866
    )


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_tiktoken(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert ids(tokenizer, text) == reference.encode(text, allowed_special="all")
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_ids_of_random_tokens_are_those_of_tiktoken(tokenizer: Tokenizer, reference: Any) -> None:
    generator, tokens = random.Random(0), list(read_ranks())
    for _ in range(3_000):
        parts = generator.choices(tokens, k=generator.randrange(1, 12))
        text = b"".join(parts).decode(errors="replace")
        assert ids(tokenizer, text) == reference.encode(text, allowed_special="all"), text


def test_special_tokens_continue_the_ranks(tokenizer: Tokenizer) -> None:
    assert len(WHISPER) == 2 + 100 + 6 + 1501
    named = {"<|endoftext|>": 50_257, "<|en|>": 50_259, "<|yue|>": 50_358, "<|transcribe|>": 50_360}
    assert {token: tokenizer.token_to_id(token) for token in named} == named
    assert tokenizer.token_to_id("<|notimestamps|>") == 50_364
    assert tokenizer.token_to_id("<|30.00|>") == 51_865 == max(tokenizer.get_vocab().values())


def test_the_ranks_are_the_published_file() -> None:
    raw = lzma.decompress(RANKS.read_bytes())
    digest = hashlib.sha256(raw).hexdigest()
    assert digest == "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126"
    assert digest in RANKS.with_name("whisper_multilingual.LICENSE").read_text()
    assert sorted(read_ranks().values()) == list(range(50_257))


def first_version(checkpoint: Checkpoint, rows: int) -> Checkpoint:
    config = Config({"llm": {"text_token_size": rows}}, "cosyvoice.yaml")
    return dataclasses.replace(checkpoint, family=FAMILIES["cosyvoice1"], config=config)


def test_a_checkpoint_of_version_1_has_it(tiny_checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    assert build_tokenizer(first_version(tiny_checkpoint, 51_866)).to_str() == tokenizer.to_str()


def test_another_number_of_rows_is_refused(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="text_token_size is 60515, but Whisper's .* has 51866 ids"):
        build_tokenizer(first_version(tiny_checkpoint, 60_515))
