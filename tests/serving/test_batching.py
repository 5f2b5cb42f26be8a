"""A CPU computes requests one by one, urgent ones first; where Triton gathers them, answers are the same."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_client import Client, Voice
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.health import HealthCheck
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.protocol import UNLIMITED, request_message

REQUESTS = 24
PIPELINE = pipeline_of(COSYVOICE2)
VOICE_STAGES = ("speaker_embedding", "audio_tokenizer", "prompt_mel")
Serve = Callable[[Path, Path], AbstractContextManager[Any]]


def counts(url: str, model: str) -> tuple[int, int]:
    """Inferences and executions of a model since the server's start."""
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stats = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model)).model_stats[0]
        return stats.inference_count, stats.execution_count


def tokens(voice: Any) -> Any:
    return voice.prompt_tokens[0, : voice.prompt_token_count[0, 0]]


def test_a_cpu_computes_requests_one_by_one(server: Any, client: Client, slt: Voice) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: client.synthesize("Hello, number zero two.", slt, seed=seed), range(4)))
    for stage in PIPELINE.native_stages:
        inferences, executions = counts(server.grpc_url, stage.name)
        assert inferences == executions


def test_an_urgent_request_passes_those_that_wait(server: Any) -> None:
    """As many calls as a second of the vocoder's work wait; the urgent one ends before most of them."""
    ended: list[str] = []
    with grpc.insecure_channel(server.grpc_url, UNLIMITED) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(name: str, urgent: bool) -> None:
            message = request_message("vocoder", PIPELINE.vocoder.sample("opt"), name, urgent=urgent)
            stub.ModelInfer(message)
            ended.append(name)

        threads = [threading.Thread(target=ask, args=(f"usual {i}", False)) for i in range(8)]
        threads.append(threading.Thread(target=ask, args=("urgent", True)))
        for thread in threads:
            thread.start()
            time.sleep(0.02)  # so that they arrive in this order
        for thread in threads:
            thread.join()
    assert ended.index("urgent") < 5


def test_the_liveness_check_leaves_busy_stages_alone(
    server: Any, client: Client, slt: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, asked = HealthCheck(server.grpc_url, 30), list[str]()
    infer = check._infer

    def noted(model: Any, feed: Any) -> Any:
        asked.append(model.name)
        return infer(model, feed)

    monkeypatch.setattr(check, "_infer", noted)
    check.alive()
    every = {stage.name for stage in (*PIPELINE.native_stages, *PIPELINE.python_stages)}
    assert set(asked) == every  # nothing is known of the time before
    asked.clear()
    client.synthesize("Hello.", slt)
    check.alive()
    assert every - set(asked) >= {"flow", "vocoder"}


@pytest.fixture(scope="module")
def gathering(serve: Serve, demo_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server whose voice stages and flow take 8 requests at once, as those of a GPU do."""
    folder = tmp_path_factory.mktemp("gathering")
    repository = shutil.copytree(demo_repository, folder / "model_repository")
    for path in (p for m in (*VOICE_STAGES, "flow") for p in repository.glob(f"{m}/**/*.pbtxt")):
        text = re.sub(r"max_batch_size: 1$", "max_batch_size: 8", path.read_text(), flags=re.MULTILINE)
        path.write_text(text)
    with serve(repository, folder / "serve.log") as running:
        yield running


def test_gathered_requests_share_executions_and_each_gets_its_own_answer(gathering: Any) -> None:
    """Voices of unequal lengths within one second of padding."""
    rng = np.random.default_rng(3)
    voices = [Voice(rng.normal(0, 0.1, 32_000 - 500 * i), 16_000, "words") for i in range(REQUESTS)]
    before = {model: counts(gathering.grpc_url, model) for model in VOICE_STAGES}
    with Client(gathering.grpc_url) as client, ThreadPoolExecutor(REQUESTS) as pool:
        encoded = list(pool.map(client.encode, voices))
    for voice, given in zip(voices, encoded, strict=True):
        assert tokens(given).size == -(-(voice.audio.size // 160) // 4)  # ceil(frames / 4) of its own length
    for model, (inferences, executions) in before.items():
        after = counts(gathering.grpc_url, model)
        assert after[0] - inferences >= REQUESTS  # the liveness check may have added its own
        assert after[1] - executions < after[0] - inferences - 1


def test_gathered_speech_is_that_of_single_requests(gathering: Any, client: Client, slt: Voice) -> None:
    before = counts(gathering.grpc_url, "flow")
    with Client(gathering.grpc_url) as other, ThreadPoolExecutor(8) as pool:
        told = list(
            pool.map(lambda seed: other.synthesize("Hello, number zero two.", slt, seed=seed), range(16))
        )
    inferences, executions = (a - b for a, b in zip(counts(gathering.grpc_url, "flow"), before, strict=True))
    assert inferences >= 8  # the liveness check may have added its own
    assert executions < inferences - 1
    alone = client.synthesize("Hello, number zero two.", slt, seed=0)
    np.testing.assert_allclose(told[0].samples, alone.samples, atol=2e-3)
