"""Speech that begins before its text has ended: text and speech take turns in one sequence.

Source: CosyVoice 2, arXiv 2412.10117, section 2.3 (official `inference_bistream`). A block is so many text
tokens and then so many speech tokens (`LanguageModelSpec.mix_ratio`). Where a block's speech ends, the model
draws the fill token and the next text is fed. The last, shorter text is followed by the task mark, and then
the model speaks until it ends the speech.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from cosytriton_ensemble.errors import CosytritonError, GenerationError, InputError
from cosytriton_ensemble.generation import (
    MAX_TOKEN_RATIO,
    FinishReason,
    Generation,
    Listener,
    PromptMaker,
    Setting,
    SpeechRequest,
    check_ids,
)
from cosytriton_ensemble.llm_spec import Prompt
from cosytriton_ensemble.sampling import FloatArray, Uniform


class StreamedGeneration(Generation):
    """A request on its way whose text comes while it is spoken; its text is pushed by other threads.

    What it says depends on its text alone, not on when the text came. Deliberate differences from the
    official code: special tokens that mean nothing at their place are ruled out (official: an error); the
    first text is fed before any speech, also behind a prefix without prompt speech (official, CosyVoice 3:
    none); prompt speech that the text was too short for stands behind the task mark (official: dropped);
    once the text is complete its length bounds the speech from below (unless `official_min_length`) and from
    above (official: no bounds).

    Raises:
        InputError: The request cannot be spoken, or the model cannot begin before the text has ended.

    """

    _least_target = 0  # all of it may still come
    _marks = 3  # where the text ends, the last token is fed a second time

    def __init__(
        self, request: SpeechRequest, listener: Listener, uniform: Uniform, setting: Setting
    ) -> None:
        super().__init__(request, listener, uniform, setting)
        spec, prefix = self._spec, request.prefix_count
        if spec.fill_id is None:
            raise InputError(
                "This model cannot begin before the text has ended. Give the whole text at once."
            )
        if not 0 <= prefix <= len(request.text):
            raise InputError(f"The prefix has {prefix} text tokens; 0 to {len(request.text)} are allowed.")
        self._fill_id = spec.fill_id
        self._specials = np.array(sorted(spec.stop_ids | {spec.fill_id}))
        self._lock = threading.Lock()  # guards what other threads change: the next three
        self._text = list(request.text[prefix:])  # not yet fed
        self._text_ended = False
        self._since = time.monotonic()  # when it last got text, or began to wait for it
        self.waits = True
        self._feed = [spec.sos_id, *request.text[:prefix]]  # what the row is to be fed next
        self._feed_complete = False
        self._prompt_speech = [spec.speech_offset + token for token in request.prompt_speech]  # not yet fed
        self._final = False  # all text was fed...
        self._final_start = 0  # ...after so many tokens
        self._drawn: list[int] = []  # tokens and fill tokens
        block_speech = spec.mix_ratio[1]
        self._next_fill = block_speech - len(request.prompt_speech) % block_speech  # its index in _drawn

    # ---- the engine's thread ----------------------------------------------------------------------------

    def prompt(self, model: PromptMaker) -> Prompt:  # noqa: ARG002 (no text encoder can be needed)
        """Lay out what a row starts from: the start mark and the blocks of the prompt speech."""
        return self.take()

    def ready(self) -> bool:
        """Tell whether enough text has come for what the row is to be fed next."""
        while not self._feed_complete:
            text = self._next_text()
            if text is None:
                return False
            speech = len(self._prompt_speech) if self._final else self._spec.mix_ratio[1]
            self._feed += [*text, *self._prompt_speech[:speech]]
            self._prompt_speech = self._prompt_speech[speech:]
            self._feed_complete = not self._prompt_speech
        return True

    def take(self) -> Prompt:
        """Take what the row is to be fed next; `ready` must have been true."""
        ids = np.array(self._feed, np.int32)
        self._feed, self._feed_complete, self.waits = [], False, False
        return Prompt(ids)

    @property
    def longest(self) -> int:
        """Positions that the row may come to hold: how much text will come is not known."""
        return self._setting.max_positions

    def advance(self, logits: FloatArray) -> FinishReason | None:
        """Draw the next token or a fill token, which is forced when its turn has come."""
        end = self._spec.eos_id if self._final else self._fill_id
        token = end
        if self._final or len(self._drawn) != self._next_fill:
            allowed = not (self._final and self._too_short()) or self._request.official_min_length
            end_logit = logits[end] if allowed else -np.inf
            logits[self._specials] = -np.inf
            logits[end] = end_logit
            token = self._spec.sampler.sample(logits, self._drawn, self._uniform)
        if token != end:
            self._drawn.append(token)
            return self._emit(token)
        if self._final:
            return "end"
        self._next_fill = len(self._drawn) + self._spec.mix_ratio[1] + 1
        self._drawn.append(token)
        self.waits = True
        with self._lock:
            self._since = time.monotonic()
        return None

    def lost(self) -> CosytritonError | None:
        """Tell why the request cannot go on: it was cancelled, or its text does not come."""
        error = super().lost()
        if error or not self.waits or self.ready():
            return error
        with self._lock:
            ended, waited = self._text_ended, time.monotonic() - self._since
        if ended and self.target < 1:
            return InputError("The text ended before there was anything to speak. Push text before its end.")
        if waited < self._setting.text_timeout:
            return None
        return GenerationError(
            f"The request waited {self._setting.text_timeout:g} s for more text or the end of the text. "
            "Push text in time, or end it."
        )

    def _next_text(self) -> list[int] | None:
        """Take the text of the next block, unified ids; None while it has not come."""
        block = self._spec.mix_ratio[0]
        with self._lock:
            if self.target < 1:
                return None  # so far there is only the reference's transcript
            if len(self._text) >= block:
                text, self._text = self._text[:block], self._text[block:]
                return text
            if not self._text_ended:
                return None
            text = self._text
        self._final, self._final_start = True, len(self.tokens)
        # The official code feeds the token that it fed last once more.
        last = [self.last_id] if self.tokens else []
        return [*last, *text, self._spec.task_id]

    def _max_tokens(self) -> int:
        if not self._final:
            return self._allowed()  # the fill tokens bound the speech
        return min(self._final_start + self.target * MAX_TOKEN_RATIO, self._allowed())

    # ---- other threads ----------------------------------------------------------------------------------

    def push_text(self, ids: Sequence[int]) -> None:
        """Append text ids.

        Raises:
            InputError: An id is none of the text's, the text has ended, or it becomes too long to be spoken.

        """
        check_ids("text", ids, self._spec.text_rows)
        with self._lock:
            if self._text_ended:
                raise InputError(f"{len(ids)} text ids came after the end of the text.")
            self._check_room(self._text_count + len(ids))
            self._text_count += len(ids)
            self._text += ids
            self._since = time.monotonic()
        self._setting.wake()

    def end_text(self) -> None:
        """Say that the text is complete."""
        with self._lock:
            self._text_ended = True
        self._setting.wake()
