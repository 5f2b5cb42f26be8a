"""Who speaks and what is said to the server, so that every request lasts as long as it is asked to.

An untrained voice may end at any token behind the least that its text allows, so the texts are long enough
for the limit to come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from cosytriton_bench.workload import MARKS, Workload
from cosytriton_client import Voice
from cosytriton_engines.calibration.builtin_set import builtin_set
from cosytriton_ensemble.generation import MIN_TOKEN_RATIO
from cosytriton_ensemble.pipeline import MAX_TEXT_TOKENS, pipeline_of
from cosytriton_ensemble.repository import version_directory

TRANSCRIPT_TOKENS = 9
TEXTS = 64
LONG_TEXT_TOKENS = MAX_TEXT_TOKENS - 10  # one piece
LONG_TOKENS = (LONG_TEXT_TOKENS - 5) * MIN_TOKEN_RATIO  # of speech that the long text is sure to last
_SPARE = 5  # a text that was cut may become fewer tokens
_SENTENCE = (
    "the morning came slowly over the hills and nobody in the village had slept because the river was rising "
    "again and the old bridge was the only way to the fields where their animals stood in the rain "
)


@dataclass(frozen=True, slots=True)
class Script:
    """What is said.

    Attributes:
        voice: a reference of the workload's length.
        texts: each is spoken for the workload's tokens; no two requests say the same, as users do not.
        long_text: spoken for `LONG_TOKENS`.
        positions: of the language model before the first token of a text.
        source: speech four times as long as the workload's, to be said in the voice.

    """

    voice: Voice
    texts: tuple[str, ...]
    long_text: str
    positions: int
    source: Voice

    @classmethod
    def of(cls, repository: Path, work: Workload) -> Script:
        """Real speech as the reference, and texts of as many tokens as the workload needs."""
        frontend = pipeline_of(work.family).text_frontend.name
        file = version_directory(repository, frontend) / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        ids = tokenizer.encode(_SENTENCE * 8).ids

        def words(count: int, first: int = 0) -> str:
            return str(tokenizer.decode(ids[first : first + count])).strip()

        with builtin_set() as (recordings, _):
            whole = Voice.from_wav(min(recordings.glob("*.wav")))
        rate, text_tokens = whole.sample_rate, work.tokens // MIN_TOKEN_RATIO + _SPARE
        voice = Voice(whole.audio[: round(work.prompt_seconds * rate)], rate, words(TRANSCRIPT_TOKENS))
        source = np.resize(whole.audio, round(4 * work.speech_seconds * rate))
        positions = MARKS + TRANSCRIPT_TOKENS + text_tokens + work.prompt_tokens
        texts = tuple(words(text_tokens, first) for first in range(TEXTS))
        return cls(voice, texts, words(LONG_TEXT_TOKENS), positions, Voice(source, rate))
