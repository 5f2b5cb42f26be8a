"""What watches a stream of speech tokens: for speech that hangs, and for pauses that are too long."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal

MAX_PERIOD = 16  # tokens
HANG_SECONDS = 4
MIN_PERIODS = 3
MAX_SILENT_RUN = 5  # tokens


class Watchdog:
    """Notices that a language model goes round in circles or has fallen silent.

    Args:
        token_rate: Tokens per second.
        silent_tokens: Tokens that mean silence; none turns that rule off.

    """

    def __init__(self, token_rate: int, silent_tokens: Collection[int] = ()) -> None:
        self._patience = HANG_SECONDS * token_rate
        self._silent_tokens = silent_tokens
        self._silent_run = 0
        self._past: deque[int] = deque(maxlen=MAX_PERIOD)  # the newest first
        self._repeats = [0] * (MAX_PERIOD + 1)  # of each period: tokens on end that repeat the one before it

    def observe(self, token: int) -> Literal["repetition", "silence"] | None:
        """Take the next token; tell what is wrong, if anything.

        "silence": the last `HANG_SECONDS` hold silent tokens only. "repetition": the last `HANG_SECONDS`
        and `MIN_PERIODS` periods are a cycle of at most `MAX_PERIOD` tokens.
        """
        self._silent_run = self._silent_run + 1 if token in self._silent_tokens else 0
        for period, former in enumerate(self._past, 1):
            self._repeats[period] = self._repeats[period] + 1 if token == former else 0
        self._past.appendleft(token)
        if self._silent_run >= self._patience:
            return "silence"
        # A cycle that repeats n times on end has lasted n tokens and its first period.
        if any(
            repeats + period >= max(self._patience, MIN_PERIODS * period)
            for period, repeats in enumerate(self._repeats)
            if period
        ):
            return "repetition"
        return None


class SilenceFilter:
    """Shortens pauses: of silent tokens on end the first `MAX_SILENT_RUN` pass (official llm_job, v3)."""

    def __init__(self, silent_tokens: Collection[int]) -> None:
        self._silent_tokens = silent_tokens
        self._run = 0

    def passes(self, token: int) -> bool:
        """Take the next token; whether it is to be spoken."""
        self._run = self._run + 1 if token in self._silent_tokens else 0
        return self._run <= MAX_SILENT_RUN
