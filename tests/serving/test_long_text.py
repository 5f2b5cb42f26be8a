"""Texts of any length are spoken whole, and the first sound does not wait for the last sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cosytriton_client import Client, Options
from cosytriton_ensemble.families import COSYVOICE3, Family
from cosytriton_ensemble.repository import TOKENIZER, version_directory
from cosytriton_ensemble.text import TextFrontend

CHINESE = "今天天气很好,我们一起去公园散步,看看花草树木,然后再回家吃饭。"
ENGLISH = "The weather is fine today, so we walk through the park and look at the trees. "
CHARACTERS = 10_000
SPEAKER = "英文女"  # of the untrained checkpoint


@pytest.fixture(scope="module")
def repository(repositories: Callable[[Family], Path]) -> Path:
    return repositories(COSYVOICE3)


@pytest.fixture(scope="module")
def running(repository: Path, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(repository, tmp_path_factory.mktemp("long") / "serve.log") as running:
        yield running


def memory(running: Any) -> float:
    """MiB of all processes of the server."""
    root = psutil.Process(running.process.pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True))) / 2**20


@pytest.mark.parametrize("sentence", [CHINESE, ENGLISH], ids=["zh", "en"])
def test_ten_thousand_characters_are_all_spoken_in_order(
    running: Any, repository: Path, sentence: str
) -> None:
    """Pieces are counted by what ends them, and each has the tokens that it may have."""
    text = sentence * (CHARACTERS // len(sentence) + 1)
    frontend = TextFrontend(version_directory(repository, "text_frontend") / TOKENIZER)
    pieces = frontend.segments(text)
    short = Options(seed=1, max_tokens=12)  # of each sentence
    with Client(running.grpc_url) as client:
        one = time.perf_counter()
        list(client.stream(frontend.pieces(text)[0], SPEAKER, **short))
        one, start, first = time.perf_counter() - one, time.perf_counter(), 0.0
        spoken, tokens, used = [], 0, []
        for chunk in client.stream(text, SPEAKER, **short):
            first = first or time.perf_counter() - start
            tokens += chunk.token_count
            if chunk.finish_reason:
                spoken.append(tokens)
                tokens = 0
                used.append(memory(running))
    assert len(spoken) == len(pieces) > 100
    for count, piece in zip(spoken, pieces, strict=True):
        assert count == min(12, 20 * len(piece))
    assert first < one + 1.0, f"first sound after {first:.2f} s, one sentence takes {one:.2f} s"
    growth = np.median(used[-20:]) / np.median(used[20:40])
    assert growth < 1.03, f"memory of the server grew by {growth - 1:.1%} in {len(pieces)} sentences"


def test_a_text_is_its_pieces_one_after_another(running: Any, repository: Path) -> None:
    """In one request and each alone they say the same: the n-th piece has the n-th seed."""
    frontend = TextFrontend(version_directory(repository, "text_frontend") / TOKENIZER)
    pieces = frontend.pieces(ENGLISH * 5)
    with Client(running.grpc_url) as client:
        whole = client.synthesize(ENGLISH * 5, SPEAKER, seed=5)
        parts = [
            client.synthesize(piece, SPEAKER, seed=5 + n, normalise=False) for n, piece in enumerate(pieces)
        ]
    assert len(parts) > 1
    assert whole.token_count == sum(part.token_count for part in parts)
    alone = np.concatenate([part.samples for part in parts])
    np.testing.assert_allclose(whole.samples, alone, rtol=0, atol=1e-3)
