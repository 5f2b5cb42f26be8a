"""From text to the token ids that the language model reads.

    frontend   what a request's text goes through: checks, markup, normalisation, pieces, ids
    stream     the same for text that arrives in parts
    language   which language a text is in
    markup     tags that are no special tokens
    normalise  the official cleanups; `spoken` and `numbers` say numbers, dates and amounts
    split      sentences and pieces
    tokens     the tokenizer

No module needs more than `tokenizers`; with `wetext` installed, numbers are normalised.
"""

from cosytriton_ensemble.text.frontend import Markup, TextFrontend
from cosytriton_ensemble.text.stream import SentenceIds, SentencePieces, TextPieces

__all__ = ["Markup", "SentenceIds", "SentencePieces", "TextFrontend", "TextPieces"]
