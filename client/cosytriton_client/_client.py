"""The client: text and a voice in, audio out."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np

from cosytriton_client._answers import Speech, encoded_voice, whole_speech
from cosytriton_client._audio import Audio
from cosytriton_client._errors import (
    ClientError,
    ConnectError,
    InvalidInputError,
    NotReadyError,
    OverloadedError,
)
from cosytriton_client._options import Options, option_tensors
from cosytriton_client._transport import Request, Tensors, Timeout, Transport, transport_for
from cosytriton_client._voice import EncodedVoice, Voice, VoiceCache
from cosytriton_ensemble import names

_PASSING = (ConnectError, NotReadyError, OverloadedError)  # another server, or the same one soon, may do it
_PAUSE = 0.2  # seconds before the first repetition; doubled for each further one

T = TypeVar("T")


class Client:
    """A connection to one server; may be shared by threads and lives best in a `with` block.

    Args:
        url: `host:port` or `grpc://host:port` (gRPC), or `http://host:port`.
        timeout: the limits of every wait.
        cached_voices: how many encoded voices are kept (at most about 0.5 MB each).
        retries: how often a request is sent again that ended with `ConnectError`, `NotReadyError` or
            `OverloadedError` before any of its sound came; after 0.2 s, then 0.4 s, ... by up to half more.
            A text that comes by pieces is not sent again.
        transport: another way to the server, for tests.
        tls: folder with `ca.crt` of whoever signed the server's certificate (without the file, the system's
            list counts), and with `tls.crt` and `tls.key` where the server wants to know its clients.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        timeout: Timeout | None = None,
        cached_voices: int = 64,
        retries: int = 0,
        transport: Transport | None = None,
        tls: Path | None = None,
    ) -> None:
        self._transport = transport or transport_for(url, timeout or Timeout(), tls)
        self._voices = VoiceCache(cached_voices)
        self._retries = retries
        self._closed = False

    def encode(self, voice: Voice) -> EncodedVoice:
        """Encode a voice, once for each content: equal samples and rate give the same answer again.

        Raises:
            ClientError: see `cosytriton_client` for the kinds.
        """
        self._check_open()
        return self._voices.get(voice.digest, lambda: self._encode(voice))

    def synthesize(self, text: str, voice: Voice | str, **options: Unpack[Options]) -> Audio:
        """Speak the text and wait for all of it. The same seed gives the same samples.

        Args:
            text: what to say, at most 10 minutes of speech.
            voice: a recording, or the name of a voice that the server knows.
            options: see `Options`.

        Raises:
            InvalidInputError: the text is empty, or the server cannot speak it in this voice and mode.
            BadAnswerError: the answer is not speech.
            ClientError: the other kinds.
        """
        return self._whole(self._words(text, voice, options))

    def stream(
        self, text: str | Iterable[str], voice: Voice | str, **options: Unpack[Options]
    ) -> Generator[Audio, None, None]:
        """Speak the text and yield its audio in chunks as they are made; together they are the whole.

        An iterator of strings (the output of a language model, say) is spoken while it comes; over gRPC only.
        The request is sent when the first chunk is asked for. Closing the generator (or dropping it, as
        `break` does) cancels the request on the server. Raises as `synthesize` does, the errors of the
        input at once.
        """
        if isinstance(text, str):
            return self._chunks(self._words(text, voice, options))
        stream: dict[str, Any] = {names.TEXT_STREAM: np.array([[uuid.uuid4().hex.encode()]], np.object_)}
        inputs = self._words(None, voice, options) | stream
        return self._chunks(inputs, (stream | piece for piece in _pieces(text)))

    def convert(self, source: Voice, voice: Voice | str, **options: Unpack[Options]) -> Audio:
        """Say what is said in the recording `source` in another voice. Raises as `synthesize` does."""
        return self._whole(self._source(source, voice, options))

    def convert_stream(
        self, source: Voice, voice: Voice | str, **options: Unpack[Options]
    ) -> Generator[Audio, None, None]:
        """`convert`, chunk by chunk as `stream` does."""
        return self._chunks(self._source(source, voice, options))

    def close(self) -> None:
        """Close the connection; further calls raise `ClientError`."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _whole(self, inputs: Tensors) -> Audio:
        with self._voices.forgotten_when_refused():
            return whole_speech(self._again(lambda: self._transport.infer(_request("tts", inputs))))

    def _chunks(
        self, inputs: Tensors, further: Iterable[Tensors] | None = None
    ) -> Generator[Audio, None, None]:
        self._check_open()
        speech = Speech()
        with self._voices.forgotten_when_refused(), closing(self._answers(inputs, further)) as answers:
            for tensors in answers:
                yield speech.chunk(tensors)
        speech.check_whole()

    def _answers(self, inputs: Tensors, further: Iterable[Tensors] | None) -> Generator[Tensors, None, None]:
        """Those of a stream, which is sent again as long as it has no first one."""

        def begun() -> tuple[Tensors | None, Generator[Tensors, None, None]]:
            answers = self._transport.stream(_request("tts_stream", inputs), further)
            return next(answers, None), answers

        first, answers = self._again(begun) if further is None else begun()
        with closing(answers):
            if first is not None:
                yield first
                yield from answers

    def _again(self, send: Callable[[], T]) -> T:
        """The answer of `send`, which is called anew where that may help."""
        for repetition in range(self._retries):
            try:
                return send()
            except _PASSING:
                time.sleep(_PAUSE * 2**repetition * random.uniform(1, 1.5))
        return send()

    def _words(self, text: str | None, voice: Voice | str, options: Options) -> dict[str, Any]:
        """The inputs of a text to speak; None: it comes by pieces."""
        words: dict[str, Any] = {} if text is None else {names.TEXT: _bytes("text", text)}
        return words | option_tensors(options) | self._voice(voice)

    def _source(self, source: Voice, voice: Voice | str, options: Options) -> dict[str, Any]:
        how, heard = option_tensors(options), self.encode(source)
        tokens: dict[str, Any] = {
            names.SOURCE_TOKENS: heard.prompt_tokens,
            names.SOURCE_TOKEN_COUNT: heard.prompt_token_count,
        }
        spoken = {name: array for name, array in self._voice(voice).items() if name != names.PROMPT_TEXT}
        return tokens | spoken | how

    def _voice(self, voice: Voice | str) -> dict[str, Any]:
        if isinstance(voice, str):
            return {names.VOICE_NAME: _bytes("name of the voice", voice)}
        transcript = voice.transcript.strip()
        words = {names.PROMPT_TEXT: _bytes("transcript", voice.transcript)} if transcript else {}
        return words | dict(self.encode(voice).tensors())

    def _encode(self, voice: Voice) -> EncodedVoice:
        rate = np.array([[voice.sample_rate]], np.int32)
        inputs = {names.AUDIO: voice.audio[None], names.SAMPLE_RATE: rate}
        return encoded_voice(self._again(lambda: self._transport.infer(_request("voice_encoder", inputs))))

    def _check_open(self) -> None:
        if self._closed:
            raise ClientError("this client is closed: make a new one.")


def _request(model: str, inputs: Tensors) -> Request:
    # Never an empty id: servers have mixed up the answers of requests that share one.
    return Request(model, inputs, uuid.uuid4().hex)


def _pieces(text: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The further requests of a text that comes by pieces."""
    for piece in text:
        if not isinstance(piece, str):
            raise InvalidInputError(f"a piece of the text is {type(piece).__name__}: give strings.")
        if piece:
            yield {names.TEXT: _encoded("text", piece)}
    yield {names.TEXT_END: np.array([[True]])}


def _bytes(name: str, text: str) -> np.ndarray[tuple[int, int], np.dtype[np.object_]]:
    """The text as a BYTES tensor [1, 1]. What can be spoken is for the server to say."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"the {name} is empty: give the words to speak.")
    return _encoded(name, text)


def _encoded(name: str, text: str) -> np.ndarray[tuple[int, int], np.dtype[np.object_]]:
    try:
        return np.array([[text.encode()]], np.object_)
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the {name} is not valid Unicode ({error.reason}).") from error
