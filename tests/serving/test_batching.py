"""Triton really batches: fewer executions than requests in its own statistics, and the same answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_client import Client, Voice

REQUESTS = 24
VOICE_STAGES = ("speaker_embedding", "audio_tokenizer", "prompt_mel")


def counts(url: str, model: str) -> tuple[int, int]:
    """Inferences and executions of a model since the server's start."""
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stats = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model)).model_stats[0]
        return stats.inference_count, stats.execution_count


def tokens(voice: Any) -> Any:
    return voice.prompt_tokens[0, : voice.prompt_token_count[0, 0]]


@pytest.fixture(scope="module")
def voices() -> list[Voice]:
    """Voices of unequal lengths within one second of padding, none of which was heard before."""
    rng = np.random.default_rng(3)
    return [Voice(rng.normal(0, 0.1, 32_000 - 500 * i), 16_000, "words") for i in range(REQUESTS)]


@pytest.fixture(scope="module")
def load(server: Any, voices: list[Voice]) -> dict[str, tuple[int, int]]:
    """Encode all voices at once: inferences and executions of each stage, by its name."""
    before = {model: counts(server.grpc_url, model) for model in VOICE_STAGES}
    with Client(server.grpc_url) as client, ThreadPoolExecutor(REQUESTS) as pool:
        encoded = list(pool.map(client.encode, voices))
    after = {model: counts(server.grpc_url, model) for model in VOICE_STAGES}
    for voice, given in zip(voices, encoded, strict=True):
        assert tokens(given).size == -(-(voice.audio.size // 160) // 4)  # ceil(frames / 4) of its own length
    return {m: (after[m][0] - before[m][0], after[m][1] - before[m][1]) for m in VOICE_STAGES}


@pytest.mark.parametrize("model", VOICE_STAGES)
def test_concurrent_requests_share_executions(load: dict[str, tuple[int, int]], model: str) -> None:
    inferences, executions = load[model]
    assert inferences >= REQUESTS  # the liveness check may have added its own
    assert executions < inferences - 1


def test_speech_shares_executions(server: Any, client: Client, slt: Voice) -> None:
    before = counts(server.grpc_url, "flow")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: client.synthesize("Hello, number zero two.", slt, seed=seed), range(16)))
    inferences, executions = (a - b for a, b in zip(counts(server.grpc_url, "flow"), before, strict=True))
    assert inferences >= 16  # the liveness check may have added its own
    assert executions < inferences - 1
