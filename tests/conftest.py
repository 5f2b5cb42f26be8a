"""What tests of several packages share: golden tensors, a tiny checkpoint, and what it exports to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import pytest

if TYPE_CHECKING:
    from cosytriton_export.checkpoint import Checkpoint

# Read when torch is loaded. Where other processes compute too, threads that wait for each other by spinning
# take twenty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

GOLDEN = Path(__file__).with_name("golden")

Arrays = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Arrays]:
    """Load `tests/golden/<name>.safetensors`."""
    from safetensors.numpy import load_file

    return lambda name: load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """An untrained checkpoint with tiny sizes. Copy its directory before you change a file."""
    from cosytriton_export.writer import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", "tiny", seed=0)


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The demo voice, a tiny trained checkpoint."""
    from cosytriton_export.checkpoint import Checkpoint
    from cosytriton_export.demo_voice import unpack_demo_voice

    return Checkpoint.open(unpack_demo_voice(tmp_path_factory.mktemp("demo")))


@pytest.fixture(scope="session")
def tiny_repository(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model repository of the tiny checkpoint. Copy it before you change a file."""
    from cosytriton_ensemble.repository import write_repository
    from cosytriton_export.exporter import export_checkpoint

    repository = tmp_path_factory.mktemp("repository")
    write_repository(repository)
    export_checkpoint(tiny_checkpoint, repository, workers=2)
    return repository


@pytest.fixture(scope="session")
def demo_repository(demo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model repository of the demo voice."""
    from cosytriton_ensemble.repository import write_repository
    from cosytriton_export.exporter import export_checkpoint

    repository = tmp_path_factory.mktemp("demo-repository")
    write_repository(repository)
    export_checkpoint(demo_checkpoint, repository, workers=2)
    return repository


@pytest.fixture(scope="session")
def server(demo_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`cosytriton serve` with the demo voice, ready to speak; shared by all tests that do not harm it."""
    with serving(demo_repository, tmp_path_factory.mktemp("server") / "serve.log") as running:
        yield running


@pytest.fixture(scope="session")
def serve() -> Callable[[Path, Path], AbstractContextManager[RunningServer]]:
    """Start a server of one's own: `with serve(repository, log_file) as running`."""
    return serving


@dataclass(frozen=True)
class RunningServer:
    """A `cosytriton serve` process."""

    process: subprocess.Popen[bytes]
    log: Path
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def grpc_url(self) -> str:
        return f"localhost:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://localhost:{self.http_port}"

    def wait_ready(self, times: int = 1, seconds: float = 120) -> None:
        """Wait until the server has said `times` times that it is ready."""
        deadline = time.monotonic() + seconds
        while self.log.read_text().count("ready: Triton") < times:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)


@contextmanager
def serving(repository: Path, log: Path) -> Iterator[RunningServer]:
    from cosytriton_ensemble.server import free_ports

    ports = free_ports(3)
    names = ("--grpc-port", "--http-port", "--metrics-port")
    flags = [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [
        str(Path(sys.executable).with_name("cosytriton")),
        "serve",
        f"--repository={repository}",
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    running = RunningServer(process, log, *ports)
    try:
        running.wait_ready()
        yield running
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
