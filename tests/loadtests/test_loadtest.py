"""All of it against the real server: it passes, and with a planted fault it fails and says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cosytriton_loadtests.commands import LIMITS
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD
from cosytriton_loadtests.workload_file import read_workload

pytestmark = pytest.mark.loadtest

SEED = 7  # each of two users gets every scenario soon
SECONDS, FAULTY_SECONDS = 14, 6
RTF = 2.0  # of a whole answer of one second, beside another user, on two shared cores
SLEEP = 2.0  # seconds of each call of the vocoder
SLOW_VOCODER = f"""
import importlib.util, json, time
from pathlib import Path
import cosytriton_ensemble

path = Path(cosytriton_ensemble.__file__).parent / "backends" / "onnxruntime" / "model.py"
spec = importlib.util.spec_from_file_location("stand_in", path)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)


class TritonPythonModel(stand_in.TritonPythonModel):
    def initialize(self, args):
        config = json.loads(args["model_config"]) | {{"default_model_filename": "model.onnx"}}
        super().initialize(args | {{"model_config": json.dumps(config)}})

    def execute(self, requests):
        time.sleep({SLEEP})
        return super().execute(requests)
"""


def load(folder: Path, server: Any, *options: object, seconds: int = FAULTY_SECONDS) -> tuple[int, str]:
    """Status and last line of `cosytriton loadtest run`, two users in a closed loop."""
    command = [
        *(Path(sys.executable).with_name("cosytriton"), "loadtest", "run", folder, "--users", 2),
        *("--seconds", seconds, "--url", server.grpc_url, "--http-url", server.http_url),
        *("--metrics-url", f"http://localhost:{server.metrics_port}", *options),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload of long streams alone, of which each has some chunks."""
    text = DEFAULT_WORKLOAD.read_text()
    voices = text[text.index("[voices") : text.index("[scenarios")].replace(
        "../tests", str(DEFAULT_WORKLOAD.parents[1] / "tests")
    )
    path = tmp_path_factory.mktemp("workload") / "streams.toml"
    texts = (
        '[texts]\nlong = ["one two three four five. six seven eight nine one. two three four five six."]\n'
    )
    path.write_text(f'{texts}\n{voices}\n[scenarios.long]\ntexts = ["long"]\nvoices = ["known"]\n')
    return path


@pytest.fixture(scope="module")
def healthy(server: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of all scenarios."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    limits = tmp_path_factory.mktemp("limits") / "slo.toml"
    promised = LIMITS.read_text()
    assert "rtf_p95 = 1.0" in promised
    limits.write_text(promised.replace("rtf_p95 = 1.0", f"rtf_p95 = {RTF}"))
    options = ("--check", 0.2, "--seed", SEED, "--limits", limits)
    status, line = load(folder, server, *options, seconds=SECONDS)
    assert status == 0, line
    return RunFolder(folder)


def test_all_scenarios_keep_the_limits(healthy: RunFolder) -> None:
    asked = {sample.scenario for sample in healthy.samples(warm=False)}
    assert asked == set(read_workload(DEFAULT_WORKLOAD).scenarios)
    assert not any(sample.error for sample in healthy.samples())
    page = healthy.report_file.read_text()
    assert "Load test: limits kept" in page
    assert page.count("plotly-graph-div") == 10


def test_a_slow_stage_is_named(
    healthy: RunFolder,
    serve: Callable[..., AbstractContextManager[Any]],
    demo_repository: Path,
    streams: Path,
    tmp_path: Path,
) -> None:
    repository = tmp_path / "model_repository"
    shutil.copytree(demo_repository, repository)
    config = repository / "vocoder" / "config.pbtxt"
    text = config.read_text().replace('backend: "onnxruntime"', 'backend: "python"')
    config.write_text(
        text.replace('default_model_filename: "model.onnx"', 'default_model_filename: "model.py"')
    )
    (repository / "vocoder" / "1" / "model.py").write_text(SLOW_VOCODER)
    with serve(repository, tmp_path / "serve.log") as slow:
        against = ("--against", healthy.path, "--workload", streams, "--check", 0)
        status, line = load(tmp_path / "run", slow, *against)
    assert status == 1
    assert "vocoder holds" in line


def test_a_dropped_chunk_is_named(server: Any, streams: Path, proxies: Any, tmp_path: Path) -> None:
    with proxies.proxy(server.grpc_url, answers=proxies.dropping) as url:
        status, line = load(tmp_path / "run", server, "--url", url, "--workload", streams, "--check", 0)
    assert status == 1
    assert "BadAnswerError in long" in line
    assert "audio was lost" in line


def test_a_mixed_voice_is_named(server: Any, streams: Path, proxies: Any, tmp_path: Path) -> None:
    with proxies.proxy(server.grpc_url, requests=proxies.Mixing()) as url:
        options = ("--url", url, "--workload", streams, "--check", 1)
        status, line = load(tmp_path / "run", server, *options)
    assert status == 1
    assert "different_answers" in line
