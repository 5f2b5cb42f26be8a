"""What a call sends, gives back and refuses; through a transport without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import pytest

from cosytriton_client import (
    BadAnswerError,
    Client,
    ClientError,
    EncodedVoice,
    InvalidInputError,
    Request,
    ServerFailureError,
    Timeout,
    Voice,
)
from cosytriton_client._audio import Samples

TTS_INPUTS = {
    "text": ("object", (1, 1)),
    "prompt_text": ("object", (1, 1)),
    "prompt_tokens": ("int32", (1, 4)),
    "prompt_token_count": ("int32", (1, 1)),
    "prompt_mel": ("float32", (1, 8, 80)),
    "prompt_frame_count": ("int32", (1, 1)),
    "speaker_embedding": ("float32", (1, 192)),
    "checkpoint": ("object", (1, 1)),
    "seed": ("int64", (1, 1)),
}


def test_synthesize_sends_the_voice_and_cuts_the_padding(transport: Any, voice: Voice) -> None:
    audio = Client(transport=transport).synthesize("Hello, 你好.", voice, seed=7)
    encode, tts = transport.requests
    assert {n: (a.dtype.name, a.shape) for n, a in encode.inputs.items()} == {
        "audio": ("float32", (1, 16_000)),
        "sample_rate": ("int32", (1, 1)),
    }
    assert tts.model == "tts"
    assert {n: (a.dtype.name, a.shape) for n, a in tts.inputs.items()} == TTS_INPUTS
    assert tts.inputs["text"].item() == "Hello, 你好.".encode()
    assert tts.inputs["prompt_text"].item() == b"what is said"
    assert tts.inputs["seed"].item() == 7
    assert (audio.samples.dtype.name, audio.samples.shape) == ("float32", (3 * 960,))
    assert (audio.sample_rate, audio.token_count, audio.seconds) == (24_000, 3, 3 / 25)


def test_every_request_has_an_id_of_its_own(transport: Any, voice: Voice) -> None:
    client = Client(transport=transport)
    for _ in range(3):
        client.synthesize("Hello.", voice)
    list(client.stream("Hello.", voice))
    ids = [request.request_id for request in transport.requests]
    assert all(ids)
    assert len(set(ids)) == len(ids)


def test_a_voice_is_encoded_once_for_each_content_never_by_transcript(
    transport: Any, samples: Samples
) -> None:
    client = Client(transport=transport)
    first = client.encode(Voice(samples, 16_000, "one"))
    assert client.encode(Voice(samples.copy(), 16_000, "another transcript")) is first
    assert client.encode(Voice(samples * 0.9, 16_000, "one")) is not first
    assert client.encode(Voice(samples, 22_050, "one")) is not first
    assert transport.models() == ["voice_encoder"] * 3


def test_the_transcript_of_the_call_is_sent_with_a_cached_voice(transport: Any, samples: Samples) -> None:
    client = Client(transport=transport)
    for transcript in ("one", "two"):
        client.synthesize("Hello.", Voice(samples, 16_000, transcript))
    sent = [r.inputs["prompt_text"].item() for r in transport.requests if r.model == "tts"]
    assert sent == [b"one", b"two"]


def test_the_least_recently_used_voice_is_forgotten(transport: Any, samples: Samples) -> None:
    client = Client(transport=transport, cached_voices=2)
    a, b, c = (Voice(samples * gain, 16_000, "x") for gain in (1, 0.9, 0.8))
    for voice in (a, b, a, c):  # b is the oldest when c comes
        client.encode(voice)
    assert len(transport.requests) == 3
    client.encode(a)
    assert len(transport.requests) == 3
    client.encode(b)
    assert len(transport.requests) == 4


def test_threads_that_want_one_voice_share_its_encoding(
    transport: Any, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, answer = threading.Barrier(4), transport.infer

    def slow(request: Any) -> Any:
        threading.Event().wait(0.1)
        return answer(request)

    monkeypatch.setattr(transport, "infer", slow)
    client = Client(transport=transport)

    def encode(_: int) -> EncodedVoice:
        together.wait(5)
        return client.encode(voice)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(encode, range(4)))
    assert len(transport.requests) == 1
    assert all(result is results[0] for result in results)


def test_a_failed_encoding_is_tried_again(
    transport: Any, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, answer = Client(transport=transport), transport.infer

    def fail(_request: Request) -> NoReturn:
        raise ServerFailureError("boom")

    monkeypatch.setattr(transport, "infer", fail)
    with pytest.raises(ServerFailureError, match="boom"):
        client.encode(voice)
    monkeypatch.setattr(transport, "infer", answer)
    assert client.encode(voice).speaker_embedding.shape == (1, 192)


def test_an_encoded_voice_cannot_be_changed(transport: Any, voice: Voice) -> None:
    encoded = Client(transport=transport).encode(voice)
    with pytest.raises(ValueError, match="read-only"):
        encoded.prompt_mel[0] = 1


def test_a_stream_yields_each_chunk(transport: Any, voice: Voice) -> None:
    chunks = list(Client(transport=transport).stream("Hello.", voice))
    assert [len(c.samples) for c in chunks] == [1920, 960]
    assert [c.token_count for c in chunks] == [2, 1]
    assert not transport.cancelled


def test_closing_the_iterator_cancels(transport: Any, voice: Voice) -> None:
    chunks = Client(transport=transport).stream("Hello.", voice)
    next(chunks)
    chunks.close()
    assert transport.cancelled


def test_a_chunk_says_why_its_sentence_ended(transport: Any, voice: Voice, speech: Any) -> None:
    transport.chunks = [speech(2, reason=""), speech(1, offset=1920, reason="repetition")]
    chunks = Client(transport=transport).stream("Hello.", voice)
    assert [chunk.finish_reason for chunk in chunks] == ["", "repetition"]


@pytest.mark.parametrize("name", ["waveform", "sample_count", "token_count"])
def test_an_answer_without_an_output_is_refused(transport: Any, voice: Voice, name: str) -> None:
    transport.whole = {k: v for k, v in transport.whole.items() if k != name}
    with pytest.raises(BadAnswerError, match=f"lacks '{name}'"):
        Client(transport=transport).synthesize("Hello.", voice)


def with_nan(answer: Any) -> Any:
    answer["waveform"][0, 5] = np.nan
    return answer


def silent(answer: Any) -> Any:
    return answer | {"waveform": np.zeros_like(answer["waveform"])}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_nan, "NaN or infinite"),
        (silent, "silent"),
        (lambda a: a | {"sample_offset": np.array([[960]])}, "begins at sample 960, but 0 were heard"),
        (lambda a: a | {"sample_rate": np.array([[0]])}, "at 0 Hz"),
        (lambda a: a | {"sample_count": np.array([[9_999]], np.int32)}, "9999 samples .* of 3380"),
        (lambda a: a | {k: a[k] * 0 for k in ("sample_count", "token_count")}, "without any audio"),
    ],
)
def test_what_is_not_speech_is_refused(
    transport: Any, voice: Voice, spoil: Callable[[Any], Any], message: str
) -> None:
    transport.whole = spoil(transport.whole)
    with pytest.raises(BadAnswerError, match=message):
        Client(transport=transport).synthesize("Hello.", voice)


@pytest.mark.parametrize("spoil", [with_nan, silent])
def test_a_stream_that_is_not_speech_is_refused(
    transport: Any, voice: Voice, speech: Any, spoil: Callable[[Any], Any]
) -> None:
    transport.chunks = [spoil(speech(2))]
    with pytest.raises(BadAnswerError):
        list(Client(transport=transport).stream("Hello.", voice))


@pytest.mark.parametrize("offset", [0, 960, 2880])
def test_a_stream_that_loses_or_repeats_audio_is_refused(
    transport: Any, voice: Voice, speech: Any, offset: int
) -> None:
    transport.chunks = [speech(2), speech(2, offset=offset)]
    chunks = Client(transport=transport).stream("Hello.", voice)
    next(chunks)
    with pytest.raises(BadAnswerError, match="audio was lost or added"):
        next(chunks)


def test_a_stream_without_chunks_is_refused(transport: Any, voice: Voice) -> None:
    transport.chunks = []
    with pytest.raises(BadAnswerError, match="without any audio"):
        list(Client(transport=transport).stream("Hello.", voice))


@pytest.mark.parametrize("method", ["synthesize", "stream"])
@pytest.mark.parametrize(
    ("text", "seed", "message"),
    [
        ("", 0, "text is empty"),
        (" \n", 0, "text is empty"),
        ("\ud800", 0, "not valid Unicode"),
        ("Hello.", -1, "seed -1"),
        ("Hello.", 2**63, "seed 9223372036854775808"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_sent(
    transport: Any, voice: Voice, method: str, text: str, seed: int, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        getattr(Client(transport=transport), method)(text, voice, seed=seed)
    assert transport.requests == []


def test_options_become_tensors_and_others_are_refused(transport: Any, voice: Voice) -> None:
    client = Client(transport=transport)
    client.synthesize("Hi.", voice, speed=1.25, instruction="Softly.<|endofprompt|>", normalise=False)
    sent = transport.requests[-1].inputs
    assert {n: sent[n].item() for n in ("speed", "instruct_text", "normalise")} == {
        "speed": 1.25,
        "instruct_text": b"Softly.<|endofprompt|>",
        "normalise": False,
    }
    with pytest.raises(InvalidInputError, match="no option 'sped'; known are seed, speed"):
        client.synthesize("Hi.", voice, sped=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="speed='fast' cannot be sent"):
        client.synthesize("Hi.", voice, speed="fast")  # type: ignore[arg-type]


def test_a_voice_without_transcript_sends_none(transport: Any, samples: Samples) -> None:
    Client(transport=transport).synthesize("Hello.", Voice(samples, 16_000))
    assert "prompt_text" not in transport.requests[-1].inputs


def test_a_named_voice_is_not_encoded(transport: Any) -> None:
    Client(transport=transport).synthesize("Hello.", "anna")
    (request,) = transport.requests
    assert request.inputs["voice_name"].item() == b"anna"
    assert "speaker_embedding" not in request.inputs


def test_a_conversion_sends_the_tokens_of_its_source(transport: Any, voice: Voice, samples: Samples) -> None:
    Client(transport=transport).convert(Voice(samples * 0.5, 16_000), voice)
    sent = transport.requests[-1].inputs
    assert sent["source_tokens"].tolist() == [[0, 1, 2, 3]]
    assert sent["source_token_count"].item() == 4
    assert not sent.keys() & {"text", "prompt_text"}


def test_text_by_pieces_shares_one_stream(transport: Any, voice: Voice) -> None:
    list(Client(transport=transport).stream(iter(["Hel", "", "lo."]), voice))
    stream = transport.requests[-1].inputs["text_stream"].item()
    assert len(stream) == 32
    assert "text" not in transport.requests[-1].inputs
    assert [piece["text_stream"].item() for piece in transport.further] == [stream] * 3
    assert [piece["text"].item() for piece in transport.further[:-1]] == [b"Hel", b"lo."]
    assert transport.further[-1]["text_end"].item() is True


@pytest.mark.parametrize("text", ["?!", "🙂"])
def test_punctuation_and_emoji_are_left_to_the_server(transport: Any, voice: Voice, text: str) -> None:
    assert Client(transport=transport).synthesize(text, voice).token_count == 3


def test_a_closed_client_says_so(transport: Any, voice: Voice) -> None:
    with Client(transport=transport) as client:
        started = client.stream("Hello.", voice)
    assert transport.closed
    with pytest.raises(ClientError, match="closed"):
        client.synthesize("Hello.", voice)
    with pytest.raises(ClientError, match="closed"):
        next(started)


@pytest.mark.parametrize(
    "url", ["", "localhost", "localhost:x", "ftp://localhost:1", "http://h:1/v2", "[::1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"server address .*: allowed are 'host:port'"):
        Client(url)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_wait_has_an_end(seconds: float) -> None:
    with pytest.raises(InvalidInputError, match=r"Timeout\(chunk="):
        Timeout(chunk=seconds)
