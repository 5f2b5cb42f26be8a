"""The text of a request: what is accepted, how it is cut, and its token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cosytriton_ensemble.pipeline import MAX_CHARACTERS, MAX_TEXT_TOKENS
from cosytriton_ensemble.text.checks import check_length, check_speakable, is_speakable
from cosytriton_ensemble.text.language import Language, language_of
from cosytriton_ensemble.text.markup import strip_markup
from cosytriton_ensemble.text.normalise import is_marked_up, normalise
from cosytriton_ensemble.text.split import Splitter, ends_sentence
from cosytriton_ensemble.text.stream import SentenceIds, SentencePieces, TextPieces
from cosytriton_ensemble.text.tokens import TextTokenizer

Markup = Literal["strip", "keep"]


class TextFrontend:
    """Turns the text to speak and the texts that prompt the model into token ids.

    `tokenizer_file` is the tokenizer.json of the export. `max_characters` bounds one text and `max_tokens` a
    piece or a prompt. Where a method takes `markup`, "strip" removes tags like <speak> or <break/> that the
    model does not know, "keep" has them spoken.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        *,
        max_characters: int = MAX_CHARACTERS,
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> None:
        self._tokenizer = TextTokenizer(tokenizer_file)
        self._max_characters = max_characters
        self._max_tokens = max_tokens
        self._splitter = Splitter(self._tokenizer.count, max_tokens, self._tokenizer.special_pattern)

    def segments(self, text: str, *, normalise: bool = True, markup: Markup = "strip") -> list[list[int]]:
        """Token ids of each piece of `text`, in the order in which they are spoken.

        See `pieces` for the errors.
        """
        pieces = self.pieces(text, normalise=normalise, markup=markup)
        return [self._tokenizer.ids(piece) for piece in pieces]

    def pieces(self, text: str, *, normalise: bool = True, markup: Markup = "strip") -> list[str]:
        """Normalise `text` and cut it; pieces of punctuation alone are left out.

        Text that is not normalised (`normalise` is false, or it names tokens like <|endofprompt|>) is one
        piece as long as the language model takes it.

        Raises `InputError`: the text is empty, too long, or there is nothing to say in it.
        """
        text = self._accept(text, "text", markup)
        check_speakable(text, "text")
        language = self._language(text)
        if not normalise or is_marked_up(text):
            fits = self._tokenizer.count(text) <= self._max_tokens
            return [text] if fits else self._cut(text, language)
        return self._cut(self._finish(self._normalised(text), language), language)

    def prompt(self, text: str, what: str, *, normalise: bool = True) -> list[int]:
        """Token ids of a transcript or an instruction; blank text has none.

        Raises `InputError`, in which `what` names the text: it is too long, or says nothing.
        """
        if not text.strip():
            return []
        text = self._accept(text, what)
        check_speakable(text, what)
        ids = self._tokenizer.ids(self._normalised(text) if normalise and not is_marked_up(text) else text)
        check_length(what, len(ids), "text tokens", self._max_tokens)
        return ids

    def stream(self, markup: Markup = "strip") -> TextPieces:
        """Take one text in parts, for a model that speaks while text arrives; it is not normalised."""
        return TextPieces(self._tokenizer, strip=markup == "strip", max_characters=self._max_characters)

    def sentence_ids(self, markup: Markup = "strip") -> SentenceIds:
        """Like `stream`, and tells where sentences end."""
        return SentenceIds(self.stream(markup))

    def says_something(self, text: str, markup: Markup = "strip") -> bool:
        """Whether there is something to say in `text` once its markup is treated."""
        return is_speakable(self._accept(text, "text", markup))

    def sentences(self) -> SentencePieces:
        """Take one text in parts and give whole sentences, to be handed to `segments`."""
        return SentencePieces(max_characters=self._max_characters)

    def _accept(self, text: str, what: str, markup: Markup = "strip") -> str:
        check_length(what, len(text), "characters", self._max_characters)
        text = self._tokenizer.canonical(text)
        return strip_markup(text, self._tokenizer.special_tokens) if markup == "strip" else text

    def _language(self, text: str) -> Language:
        return language_of(self._tokenizer.special_pattern.sub(" ", text))

    def _normalised(self, text: str) -> str:
        return normalise(text, self._language(text), self._tokenizer.special_pattern)

    def _finish(self, text: str, language: Language) -> str:
        """Give the text an end mark, which tells the language model to end; it replaces a comma."""
        text = text.rstrip(" ,，、")  # noqa: RUF001
        mark = "。" if language in ("zh", "ja") else "."
        return text if ends_sentence(text, language) else text + mark

    def _cut(self, text: str, language: Language) -> list[str]:
        return [piece for piece in self._splitter.pieces(text, language) if is_speakable(piece)]
