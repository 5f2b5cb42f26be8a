"""In-flight batching of the language model: one thread, every request shares every step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cosytriton_ensemble.bistream import StreamedGeneration
from cosytriton_ensemble.decoder import Decoder
from cosytriton_ensemble.errors import CosytritonError, GenerationError, QueueFullError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.generation import Generation, Listener, Outcome, Setting, SpeechRequest, TextInput
from cosytriton_ensemble.llm_spec import Prompt
from cosytriton_ensemble.sampling import FloatArray, Uniform, seeded_uniform
from cosytriton_ensemble.turns import Precedence

logger = logging.getLogger(__name__)

CHUNK = 128  # positions of a prompt that take about as long as a handful of steps
POLL_SECONDS = 0.05  # a cancellation can only be asked for: how often, while nothing else is to be done


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing, and has done since its start."""

    active: int  # requests that take part in the steps
    waiting: int  # requests without a row
    steps: int  # shared steps, prompts not counted
    tokens: int  # speech tokens made
    step_rows: int  # requests that took part in the steps, summed over them


class LlmEngine:
    """Serves requests by in-flight batching: they join and leave between steps, and share each step.

    A request's tokens depend on itself alone, not on what else is active.

    Args:
        model: The language model; only the engine's thread uses it.
        family: The model's family.
        max_waiting: How many requests may wait beyond those that have a row.
        max_tokens: The most speech tokens of one request.
        text_timeout: How many seconds a request may wait for text that is streamed to it.
        chunk: How many positions of a prompt are fed between two steps.
        precedence: When others may go first, between two steps.
        uniform: Makes a request's random source from its seed.

    """

    def __init__(
        self,
        model: Decoder,
        family: Family,
        *,
        max_waiting: int = 64,
        max_tokens: int = 1500,
        text_timeout: float = 30.0,
        chunk: int = CHUNK,
        precedence: Precedence | None = None,
        uniform: Callable[[int], Uniform] = seeded_uniform,
    ) -> None:
        self._model = model
        self._max_held = model.rows + max_waiting
        self._setting = Setting(
            model.spec, family, max_tokens, model.max_positions, text_timeout, self._text_came
        )
        self._uniform, self._chunk = uniform, chunk
        self._precedence = precedence or Precedence(None)
        self._active: list[Generation] = []  # index = row; changed by the engine's thread alone
        self._entering: Generation | None = None  # the active one whose prompt is being fed...
        self._chunks: deque[Prompt] = deque()  # ...and what of it is left
        self._waiting: deque[Generation] = deque()
        self._held = 0  # submitted and not ended
        self._steps = self._tokens = self._step_rows = 0
        self._closed = False
        self._changed = threading.Condition()  # guards what both sides change
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: SpeechRequest, listener: Listener) -> TextInput:
        """Queue a request; its listener hears of everything that follows.

        Returns where the rest of its text is pushed to, if it is streamed. A request takes a row as soon as
        there is text for its first block.

        Raises:
            InputError: The request cannot be spoken.
            QueueFullError: Too many requests are waiting.
            GenerationError: The engine is closed.

        """
        kind = StreamedGeneration if request.text_streaming else Generation
        generation = kind(request, listener, self._uniform(request.seed), self._setting)
        with self._changed:
            if self._closed:
                raise GenerationError("The language model's engine is closed: it takes no more requests.")
            if self._held >= self._max_held:
                raise QueueFullError(
                    f"{len(self._active)} requests are active and {len(self._waiting)} are waiting for the "
                    f"language model; it holds {self._max_held} at most. Try again later."
                )
            self._held += 1
            self._waiting.append(generation)
            self._changed.notify()
        return generation

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        with self._changed:
            active, waiting = len(self._active), len(self._waiting)
            return EngineStats(active, waiting, self._steps, self._tokens, self._step_rows)

    def close(self) -> None:
        """End the thread; what is active or waiting fails. Not to be called by a listener."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _text_came(self) -> None:
        with self._changed:
            self._changed.notify()

    # ---- the engine's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error = GenerationError("The language model's engine was closed before the speech was complete.")
        try:
            while self._work():
                self._drop_lost()
                with self._precedence.turn(self._urgent()):
                    if self._admit():
                        self._drop_lost()  # a chunk takes as long as many steps
                    self._extend()
                    self._step()
        except Exception as cause:
            logger.exception("The language model's engine stopped.")
            error = _failure("The language model's engine stopped", cause)
        finally:
            self._abandon(error)

    def _work(self) -> bool:
        """Sleep until there is something to do or to ask for; False when the engine was closed."""
        with self._changed:
            self._changed.wait_for(self._can_work, POLL_SECONDS if self._held else None)
            return not self._closed

    def _can_work(self) -> bool:
        if self._closed or any(not generation.waits or generation.ready() for generation in self._active):
            return True
        return self._next() is not None

    def _next(self) -> Generation | None:
        """The waiting request that gets the next row, if there is one and a row for it."""
        lengths = [generation.longest for generation in self._active]
        generation = next((generation for generation in self._waiting if generation.ready()), None)
        if generation is None or len(lengths) == self._model.rows:
            return None
        return generation if not lengths or self._model.fits([*lengths, generation.longest]) else None

    def _urgent(self) -> bool:
        """Whether somebody has not enough tokens for a first sound, and can get some now."""
        going = (generation for generation in self._active if not generation.waits or generation.ready())
        return self._next() is not None or any(generation.urgent for generation in going)

    def _drop_lost(self) -> None:
        """End the requests that are no longer wanted or that no longer get their text."""
        errors = {row: generation.lost() for row, generation in enumerate(self._active)}
        self._remove({row: error for row, error in errors.items() if error})
        with self._changed:
            waiting = list(self._waiting)
        # Listeners are asked without the lock, so that they cannot block those who submit.
        lost = [(generation, error) for generation in waiting if (error := generation.lost())]
        with self._changed:
            for generation, _ in lost:
                self._waiting.remove(generation)
        for generation, error in lost:
            self._end(generation, error)

    def _admit(self) -> bool:
        """Feed a part of one prompt, if there is one: a whole prompt would hold up the active requests."""
        if self._entering:
            generation, row = self._entering, self._active.index(self._entering)
        else:
            with self._changed:
                waiting = self._next()
                if waiting is None:
                    return False
                self._waiting.remove(waiting)
            generation, row = waiting, len(self._active)
        try:
            logits = self._feed(generation, row)
        except Exception as cause:
            logger.exception("The language model failed on the prompt.")
            error = _failure("The language model failed on the prompt", cause)
            if self._entering:
                self._remove({row: error})
            else:
                self._end(generation, error)
            return True
        if not self._chunks:
            self._entering = None
            self._advance([row], logits[None])
        return True

    def _feed(self, generation: Generation, row: int) -> FloatArray:
        """Feed the next chunks of a prompt, the first one to a new row; logits [speech_rows]."""
        room = self._chunk
        if self._entering is None:
            self._chunks = deque(generation.prompt(self._model).chunks(self._chunk))
            room -= len(self._chunks[0])
            logits = self._model.join(self._chunks.popleft())
            self._active.append(generation)
            self._entering = generation
        while self._chunks and len(self._chunks[0]) <= room:
            room -= len(self._chunks[0])
            logits = self._model.extend(row, self._chunks.popleft())
        return logits

    def _extend(self) -> None:
        """Feed the next text to the rows that waited for it."""
        for row in reversed(range(len(self._active))):  # a row that leaves moves none that is still to come
            generation = self._active[row]
            if generation is self._entering or not (generation.waits and generation.ready()):
                continue
            try:
                logits = self._model.extend(row, generation.take())
            except Exception as cause:
                logger.exception("The language model failed on a block of text.")
                self._remove({row: _failure("The language model failed on a block of text", cause)})
                continue
            self._advance([row], logits[None])

    def _step(self) -> None:
        waiting = {
            row
            for row, generation in enumerate(self._active)
            if generation.waits or generation is self._entering
        }
        rows = [row for row in range(len(self._active)) if row not in waiting]
        if not rows:
            return
        try:
            logits = self._model.step([generation.last_id for generation in self._active], waiting)
        except Exception as cause:
            logger.exception("A step of the language model failed.")
            error = _failure("A step of the language model failed", cause)
            self._remove(dict.fromkeys(range(len(self._active)), error))
            return
        self._steps += 1
        self._step_rows += len(rows)
        self._advance(rows, logits[rows])

    def _advance(self, rows: Sequence[int], logits: FloatArray) -> None:
        """Draw a token for each of `rows`: logits [rows, speech_rows]."""
        ended: dict[int, Outcome] = {}
        for row, row_logits in zip(rows, logits, strict=True):
            generation = self._active[row]
            count = len(generation.tokens)
            try:
                if reason := generation.advance(row_logits):
                    ended[row] = reason
            except Exception as cause:
                logger.exception("A speech token could not be made or handed on.")
                ended[row] = _failure("A speech token could not be made or handed on", cause)
            self._tokens += len(generation.tokens) - count
        self._remove(ended)

    def _remove(self, ended: Mapping[int, Outcome]) -> None:
        """Free rows, then tell their listeners. As in the model, the last row takes a freed place."""
        removed: list[tuple[Generation, Outcome]] = []
        for row in sorted(ended, reverse=True):
            self._model.leave(row)
            removed.append((self._active[row], ended[row]))
            if self._active[row] is self._entering:
                self._entering = None
            self._active[row] = self._active[-1]
            self._active.pop()
        for generation, outcome in removed:
            self._end(generation, outcome)

    def _end(self, generation: Generation, outcome: Outcome) -> None:
        with self._changed:
            self._held -= 1
        generation.end(outcome)

    def _abandon(self, error: CosytritonError) -> None:
        with self._changed:
            self._closed = True
            left = [*self._active, *self._waiting]
            self._active.clear()
            self._waiting.clear()
        for generation in left:
            self._end(generation, error)


def _failure(what: str, cause: Exception) -> GenerationError:
    error = GenerationError(f"{what}: {cause}")
    error.__cause__ = cause
    return error
