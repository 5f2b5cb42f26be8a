"""The text tokenizer of CosyVoice 1: the multilingual one of Whisper (Radford et al., arXiv 2212.04356).

No checkpoint contains it; its 50,257 ranks are part of this package (`whisper_multilingual.LICENSE`).
"""

from __future__ import annotations

import base64
import lzma
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, models

from cosytriton_export.byte_level import byte_symbols, split_tokenizer
from cosytriton_export.special_tokens import WHISPER

RANKS = Path(__file__).with_name("whisper_multilingual.tiktoken.xz")
# English contractions | letters | digits | signs | blanks
SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def whisper_tokenizer() -> Tokenizer:
    """Build the tokenizer: 50,257 ids of byte pairs, then 1,609 special tokens, together 51,866."""
    ranks = read_ranks()
    symbols = byte_symbols()
    text = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    model = models.BPE(
        vocab={text[token]: rank for token, rank in ranks.items()},
        merges=[(text[left], text[right]) for left, right in _merges(ranks)],
        ignore_merges=True,  # a whole word that has a rank is its token
    )
    return split_tokenizer(model, SPLIT_PATTERN, WHISPER)


def read_ranks() -> dict[bytes, int]:
    """Read the ranks: the bytes of a token -> its id. The last one, which nothing gives, has no bytes."""
    lines = lzma.decompress(RANKS.read_bytes()).split(b"\n")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """List all pairs whose sum has a rank, in the order of the ranks: what merges by ranks would merge."""
    return [
        (token[:place], token[place:])
        for token in sorted(ranks, key=ranks.__getitem__)
        for place in range(1, len(token))
        if token[:place] in ranks and token[place:] in ranks
    ]
