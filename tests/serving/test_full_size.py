"""Checkpoints of the official size, with random weights: written, exported, served and heard."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cosytriton_client import Client, Timeout, Voice
from cosytriton_ensemble.families import FAMILIES

pytestmark = [pytest.mark.full, pytest.mark.timeout(3_000)]

GIB = 2**30
MEMORY = 16 * GIB  # of an export, all its processes together


class Peak:
    """The largest memory of a process and its children."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def of(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            root = psutil.Process(process.pid)
            while not done.wait(0.5):
                with suppress(psutil.Error):
                    tree = (root, *root.children(recursive=True))
                    self.bytes = max(self.bytes, sum(p.memory_info().rss for p in tree))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def cosytriton(*words: str) -> Peak:
    """Run the console command; its peak of memory."""
    peak = Peak()
    command = [str(Path(sys.executable).with_name("cosytriton")), *words]
    with subprocess.Popen(command) as process, peak.of(process):
        assert process.wait() == 0
    return peak


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_size_checkpoint_speaks(family: str, tmp_path: Path, serve: Any, austen: Voice) -> None:
    """Every official key is consumed, or the export would refuse. Ten minutes each."""
    checkpoint, repository = str(tmp_path / "checkpoint"), tmp_path / "model_repository"
    written = cosytriton("checkpoint", checkpoint, "--size", "full", "--family", family)
    exported = cosytriton("export", checkpoint, "--repository", str(repository))
    reference = Voice(austen.audio[: 2 * austen.sample_rate], austen.sample_rate, "he might even")
    patient = Timeout(request=600, first_chunk=600, chunk=600)
    with serve(repository, tmp_path / "serve.log") as running:
        with Client(running.grpc_url, timeout=patient) as client:
            audio = client.synthesize("Hello.", reference, max_tokens=25)
            chunks = list(client.stream("Hello.", reference, max_tokens=25))
        root = psutil.Process(running.process.pid)
        served = sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))
    assert audio.samples.size == FAMILIES[family].samples(audio.token_count) > 0
    assert sum(chunk.samples.size for chunk in chunks) == audio.samples.size
    assert np.abs(audio.samples).max() > 1e-3
    figures = {"write": written.bytes, "export": exported.bytes, "serve": served}
    sys.stderr.write(f"\n{family}: GiB " + ", ".join(f"{k} {v / GIB:.1f}" for k, v in figures.items()) + "\n")
    assert max(written.bytes, exported.bytes) < MEMORY
