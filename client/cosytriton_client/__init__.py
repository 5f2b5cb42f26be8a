"""Speak through a cosytriton server.

    from cosytriton_client import Client, Voice

    voice = Voice.from_wav("reference.wav", transcript="what is said in it")
    with Client("localhost:8001") as client:
        client.synthesize("Hello there.", voice).save("hello.wav")
        for chunk in client.stream("Hello again.", voice, speed=1.2, seed=7):
            play(chunk.samples)
        for chunk in client.stream(words_of_a_language_model(), "anna"):  # a voice that the server knows
            play(chunk.samples)

Needs numpy and tritonclient, nothing else. Every call has a time limit (`Timeout`) and raises only
`ClientError` and its kinds.
"""

from cosytriton_client._audio import Audio
from cosytriton_client._client import Client
from cosytriton_client._errors import (
    BadAnswerError,
    ClientError,
    ConnectError,
    InvalidInputError,
    NotReadyError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerFailureError,
    UnsupportedError,
)
from cosytriton_client._options import Options
from cosytriton_client._transport import Request, Timeout, Transport
from cosytriton_client._voice import EncodedVoice, Voice

__all__ = [
    "Audio",
    "BadAnswerError",
    "Client",
    "ClientError",
    "ConnectError",
    "EncodedVoice",
    "InvalidInputError",
    "NotReadyError",
    "Options",
    "OverloadedError",
    "Request",
    "RequestCancelledError",
    "RequestTimeoutError",
    "ServerFailureError",
    "Timeout",
    "Transport",
    "UnsupportedError",
    "Voice",
]
