"""The tokenizer that the export wrote, and how much of a growing text it has decided on."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from tokenizers import Tokenizer

LONGEST_WORD = 500  # characters

_NEVER = re.compile(r"(?!)")


class TextTokenizer:
    """Byte-level BPE with special tokens (`tokenizer.json`); adds no token at the begin or the end."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = frozenset(token.content for token in added)
        names = sorted(self.special_tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, names))) if names else _NEVER
        self._beginnings = frozenset(name[:size] for name in names for size in range(1, len(name)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self.ids(text))

    def canonical(self, text: str) -> str:
        """Apply the tokenizer's own normalisation (NFC or none); the ids do not depend on it."""
        normaliser = self._tokenizer.normalizer
        return normaliser.normalize_str(text) if normaliser else text

    def decided(self, text: str) -> int:
        """How many leading characters of the canonical `text` have ids that no text behind it can change.

        BPE works inside words, so the ids before a word are decided once the split into words is. More text
        can change the last word, letters that an accent may follow, blanks before a word, and what may become
        a special token. A word counts as ended after `LONGEST_WORD` characters.
        """
        start = max((match.end() for match in self.special_pattern.finditer(text)), default=0)
        open_text = text[start : self._unfinished_special(text, start)]
        places = (place for place in reversed(self._word_starts(open_text)) if _parts(open_text, place))
        size = next(places, 0)
        return start + (size or (len(open_text) if len(open_text) > LONGEST_WORD else 0))

    def _unfinished_special(self, text: str, start: int) -> int:
        for place in range(max(start, len(text) - self._longest_beginning), len(text)):
            if text[place:] in self._beginnings:
                return place
        return len(text)

    def _word_starts(self, text: str) -> list[int]:
        splitter = self._tokenizer.pre_tokenizer
        return [start for _, (start, _) in splitter.pre_tokenize_str(text)] if splitter and text else []


def _parts(text: str, place: int) -> bool:
    """Whether the begin of a word at `place` separates the text: both sides are cut alone as together.

    Blanks must stay with the word behind them; "'" and "l" are two words until another "l" makes them one;
    and an accent belongs to the letter before.
    """
    before, after = text[place - 1 : place], text[place:]
    if before.isspace() or (before == "'" and len(after) < 2):
        return False
    return not unicodedata.category(after[0]).startswith("M")
