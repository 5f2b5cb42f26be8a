"""Cuts a text into pieces that are spoken one after another.

The rules are those of the official front end (`split_paragraph`): cut after end marks, join the sentences
while a piece stays below 80 units and cut only when it already has more than 60; a last piece below 20 units
belongs to the one before. In addition here: no cut inside numbers and addresses or after abbreviations,
repeated marks and closing quotes stay with their sentence, and no piece is longer than the model allows.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from cosytriton_ensemble.text.language import Language, counts_characters

LONG_PIECE = 80  # units, see `language.counts_characters`
FULL_PIECE = 60
SHORT_TAIL = 20

SENTENCE_MARKS = "。？！；.?!;؟۔।"  # noqa: RUF001
_CLOSERS = "\"'”’»)]}）】」』》〉"  # noqa: RUF001
_COMMAS = ",，、،"  # noqa: RUF001
_ABBREVIATION = re.compile(r"""(?:^|[\s("'.])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Mt|vs|e\.g|i\.e|No|cf)$""")
_LONGEST_ABBREVIATION = 6
_WINDOW = 10  # characters looked at for each token that a piece may have


def piece_marks(language: Language) -> str:
    """The characters after which a text in `language` may be cut."""
    return SENTENCE_MARKS + ("：、" if counts_characters(language) else ":")  # noqa: RUF001


def sentences(text: str, marks: str = SENTENCE_MARKS) -> list[str]:
    """Cut `text` after each run of end marks and closing quotes; joined, the result is `text` again."""
    cut = [0, *(end for end in _ends(text, marks) if end < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cut) if a < b]


def complete_sentences(text: str) -> int:
    """How many leading characters of a growing text are sentences that more text cannot change."""
    return max((end for end in _ends(text, SENTENCE_MARKS) if end < len(text)), default=0)


def ends_sentence(text: str, language: Language) -> bool:
    """Whether `text`, apart from closing quotes and blanks, ends with an end mark."""
    rest = text.rstrip().rstrip(_CLOSERS)
    return rest.endswith(tuple(piece_marks(language) + "…"))


def _ends(text: str, marks: str) -> list[int]:
    run = re.compile(rf"[{re.escape(marks)}]+[{re.escape(_CLOSERS)}]*")
    return [match.end() for match in run.finditer(text) if _is_end(text, match)]


def _is_end(text: str, match: re.Match[str]) -> bool:
    """A lone "." or ":" inside 3.14, 10:30, example.com or after "Dr" ends nothing."""
    following = text[match.end() : match.end() + 1]
    if match[0] in (".", ":") and following.isascii() and following.strip():
        return False
    before = text[max(0, match.start() - _LONGEST_ABBREVIATION) : match.start()]
    return not (match[0] == "." and following == " " and _ABBREVIATION.search(before))


@dataclass(frozen=True)
class Splitter:
    """Cuts texts into pieces of at most `limit` text tokens.

    `count` gives the text tokens of a string. What `keep` matches (the special tokens) is never cut.
    """

    count: Callable[[str], int]
    limit: int
    keep: re.Pattern[str]

    def pieces(self, text: str, language: Language) -> list[str]:
        """Cut `text`; joined, the pieces are `text` again."""
        units = len if counts_characters(language) else self.count
        finished: list[str] = []
        piece = ""
        for sentence in self._short_sentences(text, language):
            longer = piece + sentence
            if self._is_full(piece, longer, units):
                finished.append(piece)
                longer = sentence
            piece = longer
        if finished and units(piece) < SHORT_TAIL and self.count(finished[-1] + piece) <= self.limit:
            finished[-1] += piece
        elif piece:
            finished.append(piece)
        return finished

    def _is_full(self, piece: str, longer: str, units: Callable[[str], int]) -> bool:
        if not piece:
            return False
        full = units(piece) > FULL_PIECE and units(longer) > LONG_PIECE
        return full or self.count(longer) > self.limit

    def _short_sentences(self, text: str, language: Language) -> list[str]:
        short = []
        for sentence in sentences(text, piece_marks(language)):
            rest = sentence
            while rest:
                size = self._fitting(rest)
                short.append(rest[:size])
                rest = rest[size:]
        return short

    def _fitting(self, text: str) -> int:
        """How many leading characters form a piece: all, or up to a comma, a blank or some character."""
        window = text[: _WINDOW * self.limit]
        size = len(window)
        while (tokens := self.count(window[:size])) > self.limit:
            size = max(1, min(size - 1, size * self.limit // tokens))
            if size == 1:
                break
        if size == len(text):
            return size
        for marks in (_COMMAS, " "):
            place = max(window.rfind(mark, size // 2, size) for mark in marks)
            if place >= 0:
                return place + 1
        return self._between_characters(window, size)

    def _between_characters(self, text: str, size: int) -> int:
        """Move the cut to the left, out of a special token and from between a letter and its accents."""
        for match in self.keep.finditer(text):
            if match.start() < size < match.end():
                return match.start() or match.end()
        place = size
        while place > 1 and unicodedata.category(text[place : place + 1] or " ").startswith("M"):
            place -= 1
        return place if place > 1 else size
