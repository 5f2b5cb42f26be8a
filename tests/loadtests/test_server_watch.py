"""Looks at a server: its metrics by an endpoint of ours, its processes by one that listens here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cosytriton_loadtests import server_watch
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.server_watch import parse_metrics, read_looks, watch

TEXT = """\
# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
nv_inference_count{model="vocoder",version="1"} 3
nv_inference_count{model="vocoder",version="2"} 4
nv_inference_count{model="flow",version="1"} 5
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25
nv_pinned_memory_pool_used_bytes 1.5e3
cosytriton_ends_total{model="speech_lm",reason="a \\"b\\", {c}"} 2
cosytriton_first_audio_seconds_bucket{model="tts",le="0.1"} 9
cosytriton_first_audio_seconds_sum{model="tts"} 0.5 1700000000
python_info{version="3"} 1
"""


@contextmanager
def endpoint(text: str) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_metrics_are_summed_by_model() -> None:
    assert parse_metrics(TEXT) == {
        "nv_inference_count": {"vocoder": 7, "flow": 5},
        "nv_gpu_utilization": {"GPU-1": 0.25},
        "nv_pinned_memory_pool_used_bytes": {"": 1500},
        "cosytriton_ends_total": {"speech_lm": 2},
        "cosytriton_first_audio_seconds_sum": {"tts": 0.5},
    }


def test_looks_hold_metrics_and_processes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    before = time.time()
    with endpoint(TEXT) as port:
        info = RunInfo(f"localhost:{port}", f"http://localhost:{port}", "open", 0, ())
        with watch(info, folder, period=0.05):
            time.sleep(0.3)
    looks = read_looks(folder.server_file)
    assert len(looks) >= 3
    assert before <= looks[0].at < looks[-1].at <= time.time()
    for look in looks:
        assert not look.problem
        assert look.metrics["nv_inference_count"]["flow"] == 5
    me = psutil.Process()
    (seen,) = (one for one in looks[-1].processes if one.pid == me.pid)
    assert seen.memory == pytest.approx(me.memory_info().rss, rel=0.2)
    assert seen.cpu == pytest.approx(sum(me.cpu_times()[:2]), rel=0.2)
    assert looks[-1].shared_memory >= 0


@pytest.mark.parametrize("url", ["", "http://localhost:9", "http://localhost:9/metrics"])
def test_without_metrics_the_look_says_why(url: str, tmp_path: Path) -> None:
    with watch(RunInfo("tts.example:8001", url, "open", 0, ()), RunFolder(tmp_path), period=0.05):
        pass
    for look in read_looks(RunFolder(tmp_path).server_file):
        assert look.metrics == {}
        assert look.processes == ()
        assert ("does not answer" if url else "no address") in look.problem


@pytest.mark.parametrize("text", ["{}", "[1]", "no"])
def test_what_is_no_look_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "server.jsonl").write_text(text)
    with pytest.raises(LoadTestError, match=r"server\.jsonl"):
        read_looks(tmp_path / "server.jsonl")


def test_nobody_looked(tmp_path: Path) -> None:
    assert read_looks(tmp_path / "server.jsonl") == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/b/triton_python_backend_stub", "/r/tts_stream/1/model.py", "shm_1_0"], "tts_stream"),
        (["/b/triton_python_backend_stub", "/r/flow/1/model.onnx", "shm_1_0"], "flow"),
        (["/t/bin/tritonserver", "--model-repository=/r"], "tritonserver"),
        ([], "tritonserver"),
    ],
)
def test_a_stub_bears_the_name_of_its_model(arguments: list[str], name: str) -> None:
    process = SimpleNamespace(cmdline=lambda: arguments, name=lambda: "tritonserver")
    assert server_watch._name(process) == name  # type: ignore[arg-type]
