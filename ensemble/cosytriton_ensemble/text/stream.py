"""Text that arrives in parts, cut anywhere, as a language model writes it."""

from __future__ import annotations

from cosytriton_ensemble.text.checks import check_length, check_speakable, is_speakable
from cosytriton_ensemble.text.markup import strip_markup, unfinished_tag
from cosytriton_ensemble.text.split import complete_sentences, sentences
from cosytriton_ensemble.text.tokens import TextTokenizer

LONGEST_SENTENCE = 1_000

_LONGEST_SENTENCE = 2_000  # characters; what has no end is cut there


class _Received:
    """Counts what arrived; refuses too much of it and, at the end, text without anything to say."""

    def __init__(self, max_characters: int) -> None:
        self._limit = max_characters
        self._count = 0
        self._sample = ""  # the first part with something to say, or else the first one

    def add(self, part: str) -> None:
        self._count += len(part)
        check_length("text", self._count, "characters", self._limit)
        if not is_speakable(self._sample) and (is_speakable(part) or not self._sample.strip()):
            self._sample = part

    def check_end(self) -> None:
        check_speakable(self._sample, "text")


class TextPieces:
    """Token ids of one text that arrives in parts.

    The ids of all calls together are those of the whole text. A word is held back until it is complete, since
    its ids depend on its last letter; so are the beginning of a special token or a tag, and in Chinese the
    characters since the last punctuation mark.
    """

    def __init__(self, tokenizer: TextTokenizer, *, strip: bool, max_characters: int) -> None:
        self._tokenizer = tokenizer
        self._strip = strip
        self._received = _Received(max_characters)
        self._raw = ""  # may hold the beginning of a tag
        self._text = ""  # not given out yet

    def feed(self, part: str) -> list[int]:
        """Take the next part of the text; gives the ids that are decided now.

        Raises `InputError`: the text is longer than allowed.
        """
        self._received.add(part)
        self._raw += part
        self._take(unfinished_tag(self._raw) if self._strip else len(self._raw))
        return self._give(self._tokenizer.decided(self._text))

    def end(self) -> list[int]:
        """Give the remaining ids.

        Raises `InputError`: the text is empty, or there is nothing to say in it.
        """
        self._received.check_end()
        return self.flush()

    def flush(self) -> list[int]:
        """Give what is held back, as if the text ended here (at the end of a sentence); more may follow."""
        self._take(len(self._raw))
        return self._give(len(self._text))

    def _take(self, size: int) -> None:
        ready, self._raw = self._raw[:size], self._raw[size:]
        if self._strip:
            ready = strip_markup(ready, self._tokenizer.special_tokens)
        self._text = self._tokenizer.canonical(self._text + ready)

    def _give(self, size: int) -> list[int]:
        ready, self._text = self._text[:size], self._text[size:]
        return self._tokenizer.ids(ready) if ready else []


class SentenceIds:
    """Token ids of one text that arrives in parts, and where its sentences end.

    What is only blanks and punctuation marks is not spoken.
    """

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._open = ""  # the text since the last sentence
        self._fed = 0  # characters of it that `pieces` has
        self._spoken = False

    def feed(self, part: str) -> list[tuple[list[int], bool]]:
        """Take the next part of the text; gives ids that are decided now, each with whether a sentence ends.

        Raises `InputError`: the text is longer than allowed.
        """
        self._open += part
        given = []
        for sentence in sentences(self._open[: complete_sentences(self._open)]):
            given += self._give(sentence, ends=True)
            self._open, self._fed = self._open[len(sentence) :], 0
        return given + self._give(self._open, ends=len(self._open) > _LONGEST_SENTENCE)

    def end(self) -> list[tuple[list[int], bool]]:
        """Give the remaining ids.

        Raises `InputError`: the text is empty, or there is nothing to say in it.
        """
        given = self._give(self._open, ends=True)
        if not self._spoken:
            self._pieces.end()  # says why
        return given

    def _give(self, text: str, ends: bool) -> list[tuple[list[int], bool]]:
        if not is_speakable(text):
            return []
        ids = self._pieces.feed(text[self._fed :])
        self._fed = len(text)
        if ends:
            ids += self._pieces.flush()
        self._spoken = self._spoken or bool(ids)
        return [(ids, ends)] if ids else []


class SentencePieces:
    """Sentences of one text that arrives in parts, for a model that must know a sentence before it speaks."""

    def __init__(self, *, max_characters: int) -> None:
        self._received = _Received(max_characters)
        self._text = ""

    def feed(self, part: str) -> list[str]:
        """Take the next part of the text; gives the sentences that are complete now, mostly none.

        A sentence is complete when the character behind its end mark is known ("3." may become "3.14"). One
        without an end is given after `LONGEST_SENTENCE` characters.

        Raises `InputError`: the text is longer than allowed.
        """
        self._received.add(part)
        self._text += part
        size = complete_sentences(self._text)
        if not size and len(self._text) > LONGEST_SENTENCE:
            size = self._text.rfind(" ") + 1 or len(self._text)
        return self._give(size)

    def end(self) -> list[str]:
        """Give what remains, if anything is to be said.

        Raises `InputError`: the text is empty, or there is nothing to say in it.
        """
        self._received.check_end()
        return self._give(len(self._text))

    def _give(self, size: int) -> list[str]:
        ready, self._text = self._text[:size], self._text[size:]
        return [sentence for sentence in sentences(ready) if is_speakable(sentence)]
