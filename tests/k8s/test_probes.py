"""The chart's probes, entry point and drain, run against the real server as a node would run them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from cosytriton_client import Audio, Client, OverloadedError, Voice
from cosytriton_ensemble.health import HealthCheck
from cosytriton_ensemble.server import ServerOptions, TritonServer, free_ports

pytestmark = [pytest.mark.chart, pytest.mark.timeout(900)]

Serve = Callable[..., AbstractContextManager[Any]]
BIN = Path(sys.executable).parent
LIVENESS_SECONDS = 45  # the longest that a hung or dead model may go unnoticed
GRACE_LEFT = 20  # seconds for the process to end once nothing is spoken
ROUNDING = 1e-3  # of full scale: batches of other shapes add in another order
TEXT = "This is voice number five. Please wait for your server, and then call number zero two. " * 4


@pytest.fixture(scope="module")
def container(render: Callable[..., Any]) -> dict[str, Any]:
    """The chart's container that serves, on a CPU."""
    return dict(render("profile=cpu", "gpu.count=0").server)


def passes(container: dict[str, Any], probe: str, port: int) -> bool:
    """Run a probe once, as the kubelet does: what takes too long has failed."""
    settings = container[f"{probe}Probe"]
    program, *words = settings["exec"]["command"]
    assert words[1] == "--url=localhost:8001"
    words[1] = f"--url=localhost:{port}"
    try:
        done = subprocess.run(
            [BIN / program, *words], timeout=settings["timeoutSeconds"], capture_output=True
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def seconds_until_it_fails(container: dict[str, Any], port: int) -> float:
    """How long after now the kubelet would restart the container; the last probe has just passed."""
    settings, start, failures = container["livenessProbe"], time.monotonic(), 0
    due = start + settings["periodSeconds"]
    while failures < settings["failureThreshold"]:
        time.sleep(max(0.0, due - time.monotonic()))
        due += settings["periodSeconds"]
        failures = 0 if passes(container, "liveness", port) else failures + 1
        assert time.monotonic() < start + 3 * LIVENESS_SECONDS, "it does not fail"
    return time.monotonic() - start


@pytest.fixture
def triton(demo_repository: Path) -> Iterator[TritonServer]:
    """tritonserver alone: nothing restarts it, so that what is seen is the probe's work."""
    grpc, http, metrics = free_ports(3)
    options = ServerOptions(
        demo_repository, grpc_port=grpc, http_port=http, metrics_port=metrics, exit_timeout=5
    )
    check = HealthCheck(options.grpc_url, 60)
    with TritonServer(options) as server:
        server.start()
        while True:
            try:
                check.ready()
                break
            except Exception:  # noqa: BLE001  (it loads; the test's timeout ends this)
                time.sleep(0.5)
        yield server


def process_of(server: TritonServer, model: str) -> psutil.Process:
    found = [psutil.Process(pid) for pid in server.model_processes()]
    (only,) = [process for process in found if f"/{model}/" in " ".join(process.cmdline())]
    return only


@pytest.mark.parametrize(
    ("model", "harm"),
    [("speech_lm", signal.SIGSTOP), ("flow", signal.SIGSTOP), ("text_frontend", signal.SIGKILL)],
)
def test_a_hung_or_dead_model_fails_liveness_in_time(
    triton: TritonServer, container: dict[str, Any], model: str, harm: signal.Signals
) -> None:
    port = triton.options.grpc_port
    assert passes(container, "liveness", port)
    process_of(triton, model).send_signal(harm)
    assert seconds_until_it_fails(container, port) < LIVENESS_SECONDS
    assert triton.running()
    assert not passes(container, "readiness", port)


@pytest.fixture
def entry(serve: Serve, demo_repository: Path, container: dict[str, Any], tmp_path: Path) -> Iterator[Any]:
    """The entry point with the chart's own arguments, but for the place of the models."""
    assert container["command"] == ["cosytriton", "serve"]
    arguments = [argument for argument in container["args"] if not argument.startswith("--repository=")]
    assert "--repository=/models" in container["args"]
    with serve(demo_repository, tmp_path / "serve.log", *arguments) as running:
        yield running


def test_the_entry_point_becomes_ready_and_drains_without_losing_a_sample(
    entry: Any, container: dict[str, Any], voice: Voice
) -> None:
    """SIGTERM, as behind preStop: what runs ends whole, and what comes is refused at once."""
    for probe in ("startup", "readiness", "liveness"):
        assert passes(container, probe, entry.grpc_port), probe
    with Client(entry.grpc_url) as client:
        undisturbed = joined(client.stream(TEXT, voice, seed=3))
        stream = client.stream(TEXT, voice, seed=3)
        first = next(stream)
        entry.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert entry.process.poll() is None
        assert not passes(container, "readiness", entry.grpc_port)
        with pytest.raises(OverloadedError, match="is stopping"):
            client.synthesize("one two three", voice)
        with pytest.raises(OverloadedError, match="is stopping"):
            next(client.stream("one two three", voice))
        whole = joined([first, *stream])
    assert entry.process.wait(GRACE_LEFT) == 0
    assert whole.shape == undisturbed.shape
    np.testing.assert_allclose(whole, undisturbed, rtol=0, atol=ROUNDING)


def joined(chunks: Iterable[Audio]) -> npt.NDArray[np.float32]:
    return np.concatenate([chunk.samples for chunk in chunks])
