"""Voices and helpers for tests against the running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosytriton_client import Client, Voice
from cosytriton_ensemble.metrics import read_metric

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def slt(demo_checkpoint: Any) -> Voice:
    """A woman's voice that the demo voice was trained on."""
    return prompt(demo_checkpoint.path, "slt_1")


@pytest.fixture(scope="session")
def rms(demo_checkpoint: Any) -> Voice:
    """A man's voice that the demo voice was trained on."""
    return prompt(demo_checkpoint.path, "rms_2")


def prompt(checkpoint: Path, name: str) -> Voice:
    path = checkpoint / "prompts" / f"{name}.wav"
    return Voice.from_wav(path, path.with_suffix(".txt").read_text().strip())


@pytest.fixture(scope="session")
def austen() -> Voice:
    """A real recording, which the demo voice does not know."""
    path = DATA / "librivox_austen.wav"
    return Voice.from_wav(path, path.with_suffix(".txt").read_text().strip())


@pytest.fixture(scope="session")
def client(server: Any) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def metric(server: Any) -> Callable[[str], float]:
    """Read the sum of a metric from the server's endpoint."""

    return lambda name: read_metric(f"http://localhost:{server.metrics_port}", name)
