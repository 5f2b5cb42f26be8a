"""Bad input through the client and as raw Triton requests: a clear error each, and the next one works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Client, ClientError, InvalidInputError, Request, Voice
from cosytriton_client._grpc import GrpcTransport
from cosytriton_client._transport import Timeout

SECOND = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
NAN = SECOND.copy()
NAN[100] = np.nan


@pytest.fixture(scope="module")
def transport(server: Any) -> Iterator[GrpcTransport]:
    transport = GrpcTransport("localhost", server.grpc_port, Timeout())
    yield transport
    transport.close()


@pytest.fixture(autouse=True)
def _the_next_good_request_works(client: Client, slt: Voice) -> Iterator[None]:
    yield
    assert client.synthesize("Thank you.", slt).token_count > 0


def number(value: int, dtype: type = np.int32) -> np.ndarray[Any, Any]:
    return np.array([[value]], dtype)


def text(words: str) -> np.ndarray[Any, Any]:
    return np.array([[words.encode()]], np.object_)


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (SECOND[:0], 16_000, "0.00 s long|batch|shape|elements"),
        (SECOND[:800], 16_000, "0.05 s long"),
        (np.resize(SECOND, 31 * 16_000), 16_000, "31.00 s long .*0.25 to 30 s"),
        (SECOND, 8_000, "8000 Hz; .*16000 Hz or more"),
        (SECOND, 0, "sample rate of 0 Hz"),
        (NAN, 16_000, "NaN or infinite samples"),
        (np.zeros_like(SECOND), 16_000, "silent"),
        (SECOND * 32_768, 16_000, "not be integers"),
        (SECOND.astype(np.int16), 16_000, "unexpected datatype|data-type"),
        (SECOND[None].repeat(2, 0), 16_000, "unexpected shape"),
    ],
)
def test_reference_audio(
    transport: GrpcTransport, audio: np.ndarray[Any, Any], rate: int, message: str
) -> None:
    request = Request("voice_encoder", {"audio": audio[None], "sample_rate": number(rate)}, "raw")
    with pytest.raises(ClientError, match=message):
        transport.infer(request)


TEXTS = [
    ("", "text is empty"),
    (" \t\n", "text is empty"),
    ("👍🎉😀", "holds no letter and no digit"),
    ("?!... —", "holds no letter and no digit"),
    ("<speak><break/></speak>", "holds no letter and no digit|empty"),
    ("a" * 100_001, "100001 characters; at most 100000"),
]


@pytest.mark.parametrize(("words", "message"), TEXTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_text(client: Client, slt: Voice, words: str, message: str, streamed: bool) -> None:
    with pytest.raises(InvalidInputError, match=message):
        list(client.stream(words, slt)) if streamed else client.synthesize(words, slt)


INPUTS = [
    ({"prompt_text": text(" ")}, "'zero_shot' needs the transcript"),
    ({"text": np.array([[b"\xff\xfe"]], np.object_)}, "not UTF-8"),
    ({"prompt_tokens": np.full((1, 200), 6561, np.int32)}, "allowed are 0 to 6560"),
    ({"prompt_token_count": number(0)}, "prompt_token_count is 0"),
    ({"prompt_token_count": number(10_000)}, "prompt_token_count is 10000"),
    ({"prompt_frame_count": number(-1)}, "prompt_frame_count is -1"),
    ({"prompt_mel": np.full((1, 400, 80), np.nan, np.float32)}, "prompt_mel holds NaN"),
    ({"prompt_mel": np.zeros((1, 100, 40), np.float32)}, "unexpected shape"),
    ({"speaker_embedding": np.zeros((1, 64), np.float32)}, "unexpected shape"),
    ({"speaker_embedding": np.full((1, 192), np.inf, np.float32)}, "speaker_embedding holds NaN"),
    ({"prompt_tokens": np.zeros((1, 50), np.float32)}, "data-type|datatype"),
    ({"seed": number(1)}, "data-type|datatype"),
    ({"max_tokens": number(0)}, "max_tokens is 0"),
    ({"max_tokens": number(1_501)}, "max_tokens is 1501; give 1 to 1500"),
    ({"speed": np.array([[np.nan]], np.float32)}, "speed is nan; allowed are 0.5 to 2.0"),
    ({"mode": text("sing")}, "no mode 'sing'"),
    ({"voice_name": text("anna")}, "has a voice and names another"),
    ({"checkpoint": text("cosyvoice2:another")}, "encoded with another checkpoint"),
    (
        {"source_tokens": np.zeros((1, 25), np.int32)},
        "give the source's tokens, and no text",
    ),
    ({"prompt_text": text("words " * 400)}, "text tokens; at most 150"),
    ({"voice": text("nobody")}, "unexpected inference input 'voice'"),
]


@pytest.mark.parametrize(("changed", "message"), INPUTS)
@pytest.mark.parametrize("model", ["tts", "tts_stream"])
def test_raw_tensors(
    client: Client,
    transport: GrpcTransport,
    slt: Voice,
    model: str,
    changed: Mapping[str, np.ndarray[Any, Any]],
    message: str,
) -> None:
    good = {"text": text("Thank you."), "prompt_text": text("Hello."), **client.encode(slt).tensors()}
    request = Request(model, {**good, **changed}, "raw")
    with pytest.raises(ClientError, match=message):
        list(transport.stream(request)) if model == "tts_stream" else transport.infer(request)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("text", "no text to speak"),
        ("prompt_tokens", "The voice is incomplete"),
        ("prompt_frame_count", "The voice is incomplete"),
        ("speaker_embedding", "has no voice: give voice_name, or the tensors of voice_encoder"),
    ],
)
def test_a_missing_input_is_named(
    client: Client, transport: GrpcTransport, slt: Voice, missing: str, message: str
) -> None:
    good = {"text": text("Thank you."), "prompt_text": text("Hello."), **client.encode(slt).tensors()}
    del good[missing]
    with pytest.raises(ClientError, match=message):
        transport.infer(Request("tts", good, "raw"))


def test_an_unknown_voice_file_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"nobody\.wav"):
        Voice.from_wav("nobody.wav", "words")
