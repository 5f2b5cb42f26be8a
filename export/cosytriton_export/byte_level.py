"""Byte-level BPE (GPT-2): what the tokenizers of all families share."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers


def byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {b: chr(b) for b in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def split_tokenizer(model: models.Model, pattern: str, special_tokens: Iterable[str]) -> Tokenizer:
    """Build a tokenizer that cuts text into what `pattern` matches and gives each part to `model`.

    The ids of `special_tokens` continue those of the model; in the text each is one token.
    """
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    return tokenizer
