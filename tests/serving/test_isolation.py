"""Requests do not hear one another: same samples in company as alone, and a cancelled one leaves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Client, Request, Voice
from cosytriton_client._grpc import GrpcTransport
from cosytriton_client._transport import Timeout

TRANSCRIPT = "Hello, number zero two."  # the same for both voices, whatever they really say
TEXTS = ["This is voice number five.", "Please wait for your server."]
STREAMS = 8
# Token ids are equal or the audio would be another one. Samples are equal too, but that ONNX Runtime adds the
# products of some batch shapes in another order: 1e-5 was seen. A mixture of voices would differ by 0.1.
# Of full scale. Batches of other shapes sum in another order; 8 bits make a whole step of the last digit.
ROUNDING = {"cpu": 1e-3, "cpu_int8": 2e-2}


@pytest.fixture(scope="module")
def transport(server: Any) -> Iterator[GrpcTransport]:
    """Below the client, to send empty request ids."""
    transport = GrpcTransport("localhost", server.grpc_port, Timeout())
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def requests(client: Client, slt: Voice, rms: Voice) -> list[Request]:
    """Eight streams: two voices, two texts, two seeds, one transcript, and no request id."""
    return [
        Request(
            "tts_stream",
            {
                "text": np.array([[TEXTS[i // 2 % 2].encode()]], np.object_),
                "prompt_text": np.array([[TRANSCRIPT.encode()]], np.object_),
                "seed": np.array([[i // 4]], np.int64),
                **client.encode((slt, rms)[i % 2]).tensors(),
            },
            "",
        )
        for i in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def rounding(request: pytest.FixtureRequest) -> float:
    return ROUNDING[request.config.getoption("--profile")]


@pytest.fixture(scope="module")
def alone(transport: GrpcTransport, requests: list[Request]) -> list[np.ndarray[Any, Any]]:
    return [speak(transport, request) for request in requests]


def speak(transport: GrpcTransport, request: Request, chunks: int = 1_000) -> np.ndarray[Any, Any]:
    """The samples of the first `chunks` chunks; closing the stream before its end cancels it."""
    parts: list[np.ndarray[Any, Any]] = []
    with closing(transport.stream(request)) as answers:
        for answer in answers:
            parts.append(answer["waveform"][0])
            if len(parts) == chunks:
                break
    return np.concatenate(parts)


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Largest, of full scale; infinite where the tokens, and so the length, are others."""
    return float(np.abs(one - other).max()) if one.size == other.size else float("inf")


def test_all_eight_differ(alone: list[np.ndarray[Any, Any]], rounding: float) -> None:
    """Otherwise the next tests could not see a mixture."""
    for i, one in enumerate(alone):
        for other in alone[:i]:
            assert difference(one, other) > rounding


def test_eight_streams_each_get_the_samples_they_get_alone(
    transport: GrpcTransport,
    requests: list[Request],
    alone: list[np.ndarray[Any, Any]],
    rounding: float,
) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(pool.map(lambda request: speak(transport, request), requests))
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert difference(one, other) < rounding, f"stream {i} was disturbed"


def test_cancelling_three_leaves_five_unchanged_and_frees_their_slots(
    transport: GrpcTransport,
    requests: list[Request],
    alone: list[np.ndarray[Any, Any]],
    metric: Callable[[str], float],
    rounding: float,
) -> None:
    cancelled = {1, 4, 6}
    with ThreadPoolExecutor(STREAMS) as pool:
        chunks = [1 if i in cancelled else 1_000 for i in range(STREAMS)]
        together = list(pool.map(lambda job: speak(transport, *job), zip(requests, chunks, strict=True)))
    for i in set(range(STREAMS)) - cancelled:
        assert difference(alone[i], together[i]) < rounding, f"stream {i} was disturbed"
    deadline = time.monotonic() + 1
    while metric("cosytriton_speech_lm_active") > 0:
        assert time.monotonic() < deadline, "a slot is still taken a second after the end"
        time.sleep(0.05)


def test_a_cancelled_stream_frees_its_slot_while_the_model_is_talking(
    client: Client, slt: Voice, metric: Callable[[str], float]
) -> None:
    text = "one two three four five six seven eight nine ten, " * 10
    for seed in range(5):  # a busy machine may hear the first chunk only when the model has ended
        stream = client.stream(text, slt, seed=seed)
        next(stream)
        talking = metric("cosytriton_speech_lm_active") == 1
        stream.close()
        if talking:
            break
    assert talking
    time.sleep(1)
    assert metric("cosytriton_speech_lm_active") == 0


def test_unary_requests_among_streams_are_the_same_too(
    client: Client, transport: GrpcTransport, requests: list[Request], slt: Voice, rounding: float
) -> None:
    expected = client.synthesize(TEXTS[0], slt).samples
    stop = threading.Event()

    def company() -> None:
        while not stop.is_set():
            speak(transport, requests[1])

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(company) for _ in range(2)]
        try:
            given = [client.synthesize(TEXTS[0], slt).samples for _ in range(3)]
        finally:
            stop.set()
        for job in jobs:
            job.result()
    assert all(difference(samples, expected) < rounding for samples in given)
