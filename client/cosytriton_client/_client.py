"""The client: text and a voice in, audio out."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import closing
from types import TracebackType

import numpy as np

from cosytriton_client._answers import Speech, encoded_voice, whole_speech
from cosytriton_client._audio import Audio
from cosytriton_client._errors import ClientError, InvalidInputError
from cosytriton_client._transport import Request, Tensors, Timeout, Transport, transport_for
from cosytriton_client._voice import EncodedVoice, Voice, VoiceCache

_SEEDS = 2**63  # int64, not negative


class Client:
    """A connection to one server; may be shared by threads and lives best in a `with` block.

    Args:
        url: `host:port` or `grpc://host:port` (gRPC), or `http://host:port`.
        timeout: the limits of every wait.
        cached_voices: how many encoded voices are kept (at most about 0.5 MB each).
        transport: another way to the server, for tests.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        timeout: Timeout | None = None,
        cached_voices: int = 64,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or transport_for(url, timeout or Timeout())
        self._voices = VoiceCache(cached_voices)
        self._closed = False

    def encode(self, voice: Voice) -> EncodedVoice:
        """Encode a voice, once for each content: equal samples and rate give the same answer again.

        Raises:
            ClientError: see `cosytriton_client` for the kinds.
        """
        self._check_open()
        return self._voices.get(voice.digest, lambda: self._encode(voice))

    def synthesize(self, text: str, voice: Voice, seed: int = 0) -> Audio:
        """Speak the text and wait for all of it. The same seed gives the same samples.

        Raises:
            InvalidInputError: the text is empty, or the server cannot speak it.
            BadAnswerError: the answer is not speech.
            ClientError: the other kinds.
        """
        return whole_speech(self._transport.infer(self._request("tts", text, voice, seed)))

    def stream(self, text: str, voice: Voice, seed: int = 0) -> Generator[Audio, None, None]:
        """Speak the text and yield its audio in chunks as they are made; together they are the whole.

        The request is sent when the first chunk is asked for. Closing the generator (or dropping it, as
        `break` does) cancels the request on the server. Raises as `synthesize` does, the errors of the
        input at once.
        """
        return self._chunks(self._request("tts_stream", text, voice, seed))

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

    def _chunks(self, request: Request) -> Generator[Audio, None, None]:
        self._check_open()
        speech = Speech()
        with closing(self._transport.stream(request)) as answers:
            for tensors in answers:
                yield speech.chunk(tensors)
        speech.check_whole()

    def _request(self, model: str, text: str, voice: Voice, seed: int) -> Request:
        if not 0 <= seed < _SEEDS:
            raise InvalidInputError(f"seed {seed}: allowed are 0 to 2**63 - 1.")
        words = {"text": _bytes("text", text), "prompt_text": _bytes("transcript", voice.transcript)}
        inputs = words | dict(self.encode(voice).tensors()) | {"seed": np.array([[seed]], np.int64)}
        return _request(model, inputs)

    def _encode(self, voice: Voice) -> EncodedVoice:
        inputs = {"audio": voice.audio[None], "sample_rate": np.array([[voice.sample_rate]], np.int32)}
        return encoded_voice(self._transport.infer(_request("voice_encoder", inputs)))

    def _check_open(self) -> None:
        if self._closed:
            raise ClientError("this client is closed: make a new one.")


def _request(model: str, inputs: Tensors) -> Request:
    # Never an empty id: servers have mixed up the answers of requests that share one.
    return Request(model, inputs, uuid.uuid4().hex)


def _bytes(name: str, text: str) -> np.ndarray[tuple[int, int], np.dtype[np.object_]]:
    """The text as a BYTES tensor [1, 1]. What can be spoken is for the server to say."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"the {name} is empty: give the words to speak.")
    try:
        return np.array([[text.encode()]], np.object_)
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the {name} is not valid Unicode ({error.reason}).") from error
