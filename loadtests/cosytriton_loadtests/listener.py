"""Makes one request through the client and notes when what was heard."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import cast

from cosytriton_client import Audio, Client, Options, Voice
from cosytriton_loadtests.playback import audible
from cosytriton_loadtests.samples import Chunk, Sample
from cosytriton_loadtests.waveforms import Samples
from cosytriton_loadtests.workload import Ask

ACCEPTED = "BadInputAccepted"  # kind of the error when the server speaks what it has to refuse

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, by a clock that is never set back."""
    return _EPOCH + time.monotonic()


def listen(client: Client, ask: Ask, voice: Voice | str, intended: float | None = None) -> Sample:
    """Make the request; whatever becomes of it is in the sample (without its stage).

    Args:
        client: for the protocol of the request.
        ask: what to ask for.
        voice: of the request (`Workload.voice`).
        intended: when it was due, in seconds since the epoch; None: now.
    """
    hearing = Hearing(ask, intended)
    hearing.hear(client, voice)
    return hearing.sample()


class Hearing:
    """A request under way; `sample` gives what is known of it, also when `hear` was broken off."""

    def __init__(self, ask: Ask, intended: float | None = None) -> None:
        self._ask = ask
        self._sent = now()
        self._intended = self._sent if intended is None else intended
        self._chunks: list[Chunk] = []
        self.parts: list[Samples] = []  # what was heard, chunk by chunk
        self._digest = hashlib.sha256()
        self._tokens = 0
        self._error = self._message = ""
        self._cancelled = False

    def hear(self, client: Client, voice: Voice | str) -> None:
        """Make the request and listen until its end; an error is noted, not raised."""
        self._sent = now()
        try:
            self._listen(client, voice)
        except Exception as error:  # noqa: BLE001  (whatever it is, it happened to a request: it is counted)
            self._error, self._message = type(error).__name__, str(error)
        else:
            if self._ask.bad:
                self._error = ACCEPTED
                self._message = f"the server spoke a request with a wrong {self._ask.bad}."

    def sample(self, error: str = "", message: str = "") -> Sample:
        """What is known now; `error` says why the request was broken off."""
        return Sample(
            scenario=self._ask.scenario,
            stage="",
            protocol=self._ask.protocol,
            request=asdict(self._ask),
            intended=self._intended,
            sent=self._sent,
            ended=now(),
            chunks=tuple(self._chunks),
            tokens=self._tokens,
            digest=self._digest.hexdigest() if self._chunks else "",
            error=error or self._error,
            message=message or self._message,
            cancelled=self._cancelled,
        )

    def _listen(self, client: Client, voice: Voice | str) -> None:
        options = cast(Options, self._ask.options)
        if not self._ask.streams:
            self._note([client.synthesize(self._ask.text, voice, **options)])
            return
        with closing(client.stream(self._ask.text, voice, **options)) as stream:
            self._note(stream)

    def _note(self, stream: Iterable[Audio]) -> None:
        for audio in stream:
            at = now()
            heard = audible(audio.samples, audio.sample_rate)
            self._chunks.append(Chunk(at, audio.seconds, heard))
            self.parts.append(audio.samples)
            self._digest.update(audio.samples.tobytes())
            self._tokens += audio.token_count
            if len(self._chunks) == self._ask.cancel_after:
                self._cancelled = True
                return
