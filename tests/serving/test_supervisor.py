"""`cosytriton serve` as a process: it restarts what died, ends cleanly, and says what is wrong."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosytriton_client import Client, ClientError, Voice
from cosytriton_ensemble.advice import threads_for
from cosytriton_ensemble.machine import Processor
from cosytriton_ensemble.names import THREADS_VARIABLE

Serve = Callable[..., AbstractContextManager[Any]]
TEXT = "This is voice number five."


@pytest.fixture(scope="module")
def victim(serve: Serve, demo_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of our own, to be harmed."""
    with serve(demo_repository, tmp_path_factory.mktemp("victim") / "serve.log") as running:
        yield running


def model_process(server: Any, model: str) -> psutil.Process:
    """The process of a Python model."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if f"/{model}/" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no process of {model}")


@pytest.mark.parametrize(("model", "harm"), [("speech_lm", signal.SIGKILL), ("flow", signal.SIGKILL)])
def test_a_killed_model_is_served_again_and_nobody_hangs(
    victim: Any, slt: Voice, model: str, harm: signal.Signals
) -> None:
    ready = victim.log.read_text().count("ready: Triton")
    with Client(victim.grpc_url) as client, ThreadPoolExecutor(4) as pool:
        client.encode(slt)

        def until_it_fails() -> float:
            try:
                while True:
                    client.synthesize(TEXT, slt)
            except ClientError:
                return time.monotonic()

        waiting = [pool.submit(until_it_fails) for _ in range(4)]
        time.sleep(1)
        killed = time.monotonic()
        model_process(victim, model).send_signal(harm)
        for job in waiting:
            assert job.result(timeout=30) - killed < 30
    victim.wait_ready(ready + 1, seconds=30 - (time.monotonic() - killed))
    with Client(victim.grpc_url) as client:
        assert client.synthesize(TEXT, slt).token_count > 0
    assert time.monotonic() - killed < 30


@pytest.mark.parametrize("model", ["flow", "speech_lm"])
def test_every_graph_is_told_the_threads_that_doctor_advises(server: Any, model: str) -> None:
    advised = str(threads_for(Processor.here().cores))
    assert model_process(server, model).environ()[THREADS_VARIABLE] == advised


def run_cli(*arguments: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("cosytriton")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def test_health_is_real_inference_and_its_exit_status(server: Any) -> None:
    assert run_cli("health", f"--url={server.grpc_url}")[0] == 0
    assert run_cli("health", f"--url={server.grpc_url}", "--ready")[0] == 0
    status, message = run_cli("health", "--url=localhost:1")
    assert status == 2
    assert "localhost:1 is not well" in message


def test_a_port_in_use_is_named_with_its_flag(server: Any, demo_repository: Path) -> None:
    flags = (f"--repository={demo_repository}", "--grpc-port=0", "--metrics-port=0")
    status, message = run_cli("serve", *flags, f"--http-port={server.http_port}")
    assert status == 2
    assert f"Port {server.http_port} on 127.0.0.1 cannot be used" in message
    assert "--http-port" in message


def test_an_incomplete_repository_is_refused_before_anything_starts(tmp_path: Path) -> None:
    status, message = run_cli("serve", f"--repository={tmp_path}")
    assert status == 2
    assert "lacks" in message
    assert "cosytriton export" in message


def test_sigterm_lets_running_speech_end_and_leaves_nothing_behind(
    serve: Serve, demo_repository: Path, tmp_path: Path, slt: Voice
) -> None:
    log = tmp_path / "serve.log"
    with serve(demo_repository, log, "--exit-timeout=30") as running, Client(running.grpc_url) as client:
        children = psutil.Process(running.process.pid).children(recursive=True)
        triton = " ".join(part for child in children for part in child.cmdline())
        regions = re.search(r"shm-region-prefix-name=(\S+)", triton)[1]  # type: ignore[index]
        assert list(Path("/dev/shm").glob(f"{regions}*"))
        stream = client.stream(TEXT, slt)
        first = next(stream)
        running.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert sum(chunk.token_count for chunk in rest) > 0
        assert first.token_count > 0
        assert running.process.wait(45) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not list(Path("/dev/shm").glob(f"{regions}*"))
