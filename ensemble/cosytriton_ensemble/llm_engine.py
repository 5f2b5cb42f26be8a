"""In-flight batching of the language model: one thread, every request shares every step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from cosytriton_ensemble.errors import CancelledError, CosytritonError, GenerationError, QueueFullError
from cosytriton_ensemble.generation import Generation, Listener, SpeechRequest
from cosytriton_ensemble.language_model import LanguageModelSpec, TokenIds
from cosytriton_ensemble.sampling import FloatArray, Uniform, seeded_uniform

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """The language model as the engine sees it; `LanguageModel` is the real one."""

    spec: LanguageModelSpec
    rows: int
    max_positions: int

    def join(self, ids: TokenIds) -> FloatArray:
        """Take the next row for a prompt [n]; logits [speech_rows]. If it raises, no row was taken."""

    def step(self, ids: Sequence[int]) -> FloatArray:
        """Feed one id to every row in use; logits [rows in use, speech_rows], which may be overwritten."""

    def leave(self, row: int) -> None:
        """Free a row; the last row in use takes its place."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing, and has done since its start."""

    active: int  # requests that take part in the steps
    waiting: int  # requests without a row
    steps: int  # shared steps, prompts not counted
    tokens: int  # speech tokens made


class LlmEngine:
    """Serves requests by in-flight batching: they join and leave between steps, and share each step.

    A request's tokens depend on itself alone, not on what else is active.

    Args:
        model: The language model; only the engine's thread uses it.
        max_waiting: How many requests may wait beyond those that have a row.
        max_tokens: The most speech tokens of one request.
        uniform: Makes a request's random source from its seed.

    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_waiting: int = 64,
        max_tokens: int = 1500,
        uniform: Callable[[int], Uniform] = seeded_uniform,
    ) -> None:
        self._model = model
        self._max_held = model.rows + max_waiting
        self._max_tokens = max_tokens
        self._uniform = uniform
        self._active: list[Generation] = []  # index = row; changed by the engine's thread alone
        self._waiting: deque[Generation] = deque()
        self._held = 0  # submitted and not ended
        self._steps = self._tokens = 0
        self._closed = False
        self._changed = threading.Condition()  # guards what both sides change
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: SpeechRequest, listener: Listener) -> None:
        """Queue a request; its listener hears of everything that follows.

        Raises:
            InputError: The request cannot be spoken.
            QueueFullError: Too many requests are waiting.
            GenerationError: The engine is closed.

        """
        spec, max_positions = self._model.spec, self._model.max_positions
        uniform = self._uniform(request.seed)
        generation = Generation(request, listener, uniform, spec, self._max_tokens, max_positions)
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

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        with self._changed:
            return EngineStats(len(self._active), len(self._waiting), self._steps, self._tokens)

    def close(self) -> None:
        """End the thread; what is active or waiting fails. Not to be called by a listener."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the engine's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error = GenerationError("The language model's engine was closed before the speech was complete.")
        try:
            while self._work():
                self._drop_cancelled()
                if self._admit():
                    self._drop_cancelled()  # a prompt takes as long as many steps
                self._step()
        except Exception as cause:
            logger.exception("The language model's engine stopped.")
            error = _failure("The language model's engine stopped", cause)
        finally:
            self._abandon(error)

    def _work(self) -> bool:
        """Sleep until there is something to do; False when the engine was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._active)
            return not self._closed

    def _drop_cancelled(self) -> None:
        error = CancelledError("The request was cancelled.")
        self._remove({row: error for row, generation in enumerate(self._active) if generation.cancelled()})
        with self._changed:
            waiting = list(self._waiting)
        # Listeners are asked without the lock, so that they cannot block those who submit.
        gone = [generation for generation in waiting if generation.cancelled()]
        with self._changed:
            for generation in gone:
                self._waiting.remove(generation)
        for generation in gone:
            self._end(generation, error)

    def _admit(self) -> bool:
        """Give one waiting request a row, if there is one: more prompts would hold up the active ones."""
        with self._changed:
            if not self._waiting or len(self._active) == self._model.rows:
                return False
            generation = self._waiting.popleft()
        try:
            logits = self._model.join(generation.prompt)
        except Exception as cause:
            logger.exception("The language model failed on a prompt.")
            self._end(generation, _failure("The language model failed on the prompt", cause))
            return True
        self._active.append(generation)
        self._advance(len(self._active) - 1, logits[None])
        return True

    def _step(self) -> None:
        if not self._active:
            return
        try:
            logits = self._model.step([generation.last_id for generation in self._active])
        except Exception as cause:
            logger.exception("A step of the language model failed.")
            error = _failure("A step of the language model failed", cause)
            self._remove(dict.fromkeys(range(len(self._active)), error))
            return
        self._steps += 1
        self._advance(0, logits)

    def _advance(self, first: int, logits: FloatArray) -> None:
        """Draw a token for each row from `first` on: logits [rows, speech_rows]."""
        ended: dict[int, CosytritonError | None] = {}
        for row, row_logits in enumerate(logits, first):
            generation = self._active[row]
            count = len(generation.tokens)
            try:
                if not generation.advance(row_logits):
                    ended[row] = None
            except Exception as cause:
                logger.exception("A speech token could not be made or handed on.")
                ended[row] = _failure("A speech token could not be made or handed on", cause)
            self._tokens += len(generation.tokens) - count
        self._remove(ended)

    def _remove(self, ended: Mapping[int, CosytritonError | None]) -> None:
        """Free rows, then tell their listeners. As in the model, the last row takes a freed place."""
        removed: list[tuple[Generation, CosytritonError | None]] = []
        for row in sorted(ended, reverse=True):
            self._model.leave(row)
            removed.append((self._active[row], ended[row]))
            self._active[row] = self._active[-1]
            self._active.pop()
        for generation, error in removed:
            self._end(generation, error)

    def _end(self, generation: Generation, error: CosytritonError | None) -> None:
        with self._changed:
            self._held -= 1
        generation.end(error)

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
