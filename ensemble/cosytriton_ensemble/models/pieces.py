"""The speech tokens of a request, piece after piece: the next one is made while this one is spoken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import GenerationError
from cosytriton_ensemble.models.loopback import Loopback, Responses
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.models.sources import TokenSource
from cosytriton_ensemble.spec import Stage
from cosytriton_ensemble.utterance import text_of

AHEAD = 2  # pieces whose tokens are kept: the one that is spoken and the next
PATIENCE = 0.2  # seconds between two looks at the client while nothing comes


@dataclass(slots=True)
class Piece:
    """The tokens of one piece of text so far."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    reason: str = "end"  # why it ended


class PieceReader:
    """Reads the tokens of all pieces on a second thread; a context manager that cancels what is left.

    So a client who goes is noticed between two tokens and not after the flow, and the language model's slot
    is free at once.
    """

    def __init__(self, source: TokenSource, stage: Stage, models: Loopback, sender: Sender) -> None:
        self._source, self._stage, self._models, self._sender = source, stage, models, sender
        self._arrived: SimpleQueue[list[int] | str | Exception | None] = SimpleQueue()
        self._ahead = threading.Semaphore(AHEAD)
        self._responses: Responses | None = None
        self._closed = threading.Event()

    def __enter__(self) -> PieceReader:
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._ahead.release()
        self._source.close()
        if (responses := self._responses) is not None:
            responses.close()

    def __iter__(self) -> Iterator[Iterator[Piece]]:
        """Each piece, as an iterator that gives it again whenever it has grown, at last when it has ended."""
        while (first := self._next()) is not None:
            yield self._grow(first)
            self._ahead.release()

    def _grow(self, arrived: list[int] | str) -> Iterator[Piece]:
        piece = Piece()
        while not isinstance(arrived, str):
            piece.tokens += arrived
            yield piece
            following = self._next()
            assert following is not None, "a piece ends before the pieces do"
            arrived = following
        if not piece.tokens:
            raise GenerationError("The language model ended before its first speech token; try another seed.")
        piece.ended, piece.reason = True, arrived
        yield piece

    def _next(self) -> list[int] | str | None:
        """Tokens, the reason of a piece's end, or None after the last piece."""
        while True:
            try:
                arrived = self._arrived.get(timeout=PATIENCE)
            except Empty:
                self._sender.check_client()
                continue
            if isinstance(arrived, Exception):
                raise arrived
            return arrived

    def _read(self) -> None:
        try:
            for feed in self._source:
                self._ahead.acquire()
                if self._closed.is_set():
                    return
                reason = "end"
                with self._models.stream(self._stage, feed) as self._responses:
                    if self._closed.is_set():
                        return
                    self._source.started(self._responses)
                    for response in self._responses:
                        if self._closed.is_set():
                            return
                        self._sender.check_client()
                        reason = text_of(response, names.FINISH_REASON) or reason
                        self._arrived.put(response[names.TOKENS].tolist() if names.TOKENS in response else [])
                self._arrived.put(reason)
            self._arrived.put(None)
        except Exception as error:  # noqa: BLE001  (it is raised again where the request is answered)
            self._arrived.put(error)
