"""One repository, several profiles: the server of each serves its own files, or says what is missing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as grpc
from onnxruntime.quantization import quantize_dynamic

from cosytriton_client import Client, Voice
from cosytriton_ensemble import server as server_module
from cosytriton_ensemble.cli import main
from cosytriton_ensemble.errors import InputError, ServerError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import Manifest, manifest_path
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU_INT8, FP32_GRAPH, INT8_GRAPH
from cosytriton_ensemble.repository import artifacts, version_directory
from cosytriton_ensemble.server import ServerOptions, TritonServer
from cosytriton_ensemble.spec import Array, Feed, Stage

PIPELINE = pipeline_of(COSYVOICE2)
QUANTISED = [model for model, name in artifacts(PIPELINE, CPU_INT8).items() if name == INT8_GRAPH]
TEXT = "Please wait for your server."

Serve = Callable[..., AbstractContextManager[Any]]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quantise(repository: Path, model: str) -> Path:
    """What a build writes: an INT8 graph beside the FP32 one, then its manifest."""
    folder = version_directory(repository, model)
    quantize_dynamic(folder / FP32_GRAPH, folder / INT8_GRAPH, op_types_to_quantize=["MatMul"])
    replace(
        Manifest.read(folder / FP32_GRAPH),
        artifact=INT8_GRAPH,
        files={INT8_GRAPH: sha256_of(folder / INT8_GRAPH)},
        source={FP32_GRAPH: sha256_of(folder / FP32_GRAPH)},
        precision="int8",
        calibration="of a set of recordings",
        tolerance={"snr": 10.0},
        errors={"snr": 20.0},
        better={"snr": "higher"},
    ).write(folder)
    return folder / INT8_GRAPH


@pytest.fixture(scope="module")
def both(server: Any, demo_repository: Path) -> Iterator[Path]:
    """The repository that `server` serves, once INT8 graphs were added to it while it serves."""
    assert server.process.poll() is None
    built = [quantise(demo_repository, model) for model in QUANTISED]
    yield demo_repository
    for path in built:
        path.unlink()
        manifest_path(path).unlink()


@pytest.fixture(scope="module")
def int8_server(both: Path, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(both, tmp_path_factory.mktemp("int8") / "serve.log", "--profile=cpu_int8") as running:
        yield running


# ---- what is served -----------------------------------------------------------------------------------


def file_of(url: str, model: str) -> str:
    """What a server says that it serves for a model."""
    config = grpc.InferenceServerClient(url).get_model_config(model, as_json=True)["config"]
    told = config.get("parameters", {}).get("model_file")  # a Python model
    return str(told["string_value"] if told else config["default_model_filename"])


def test_each_server_names_the_files_of_its_profile(server: Any, int8_server: Any) -> None:
    for model in QUANTISED:
        assert file_of(server.grpc_url, model) == FP32_GRAPH
        assert file_of(int8_server.grpc_url, model) == INT8_GRAPH
    assert file_of(int8_server.grpc_url, PIPELINE.prompt_mel.name) == FP32_GRAPH  # it has no weights
    assert "profile cpu_int8" in int8_server.log.read_text()


def served_answer(url: str, stage: Stage, feed: Feed) -> Array:
    inputs = [grpc.InferInput(t.name, list(feed[t.name].shape), t.dtype) for t in stage.inputs]
    for given in inputs:
        given.set_data_from_numpy(feed[given.name()])
    answer = grpc.InferenceServerClient(url).infer(stage.name, inputs)
    return np.asarray(answer.as_numpy(stage.outputs[0].name))


@pytest.mark.parametrize("stage", [PIPELINE.flow, PIPELINE.vocoder], ids=lambda stage: stage.name)
def test_the_file_of_the_profile_is_what_computes(
    server: Any, int8_server: Any, both: Path, stage: Stage
) -> None:
    """Each server's answer is that of its own file, and the two files' answers differ."""
    feed, folder = stage.sample("min", ragged=False), version_directory(both, stage.name)
    computed = {}
    for name in (FP32_GRAPH, INT8_GRAPH):
        session = ort.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        computed[name] = np.asarray(session.run([stage.outputs[0].name], feed)[0])
    for running, own, other in ((server, FP32_GRAPH, INT8_GRAPH), (int8_server, INT8_GRAPH, FP32_GRAPH)):
        answer = served_answer(running.grpc_url, stage, feed)
        distance = {name: float(np.abs(answer - computed[name]).max()) for name in computed}
        assert distance[own] < distance[other] / 10


def test_int8_speaks(int8_server: Any, slt: Voice) -> None:
    with Client(int8_server.grpc_url) as client:
        spoken = client.synthesize(TEXT, slt, seed=7)
        assert spoken.finish_reason == "end"
        assert spoken.token_count > 20


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.fixture
def copied(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "repository"))


def refusal(capsys: pytest.CaptureFixture[str], repository: Path, profile: str = "cpu_int8") -> str:
    """What `cosytriton serve` says instead of serving."""
    assert main(["serve", f"--repository={repository}", f"--profile={profile}"]) == 2
    return capsys.readouterr().err


def build_command(repository: Path, profile: str = "cpu_int8") -> str:
    return f"Run `cosytriton build --profile {profile} --repository {repository}`."


def test_an_artifact_that_was_not_built_is_refused_with_the_command_that_builds_it(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (version_directory(copied, "vocoder") / INT8_GRAPH).unlink()
    message = refusal(capsys, copied)
    assert f"lacks vocoder/1/{INT8_GRAPH}. {build_command(copied)}" in message
    plans = refusal(capsys, copied, "gpu_fp16")
    assert "lacks audio_tokenizer/1/model.fp16.plan" in plans
    assert build_command(copied, "gpu_fp16") in plans


def test_an_artifact_of_an_older_export_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = version_directory(copied, "flow") / FP32_GRAPH
    graph.write_bytes(graph.read_bytes() + b"\x00")
    known = Manifest.read(graph)
    replace(known, files={**known.files, FP32_GRAPH: sha256_of(graph)}).write(graph.parent)
    message = refusal(capsys, copied)
    assert f"{graph.with_name(INT8_GRAPH)} is stale: {INT8_GRAPH} was built from {FP32_GRAPH}" in message
    assert build_command(copied) in message


def test_half_an_artifact_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = version_directory(copied, "speech_lm") / INT8_GRAPH
    artifact.write_bytes(artifact.read_bytes()[: artifact.stat().st_size // 2])
    message = refusal(capsys, copied)
    assert f"{artifact} is not what its manifest was written for" in message
    assert build_command(copied) in message


def test_a_profile_that_is_not_known_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--profile=gpu_int4"])
    message = capsys.readouterr().err
    assert all(repr(name) in message or name in message for name in ("gpu_int4", "cpu_int8", "gpu_fp16"))
    with pytest.raises(InputError, match="no profile 'gpu_int4'; known are cpu, cpu_int8, gpu, gpu_fp16"):
        TritonServer(ServerOptions(Path("unused"), profile="gpu_int4"))


@pytest.mark.parametrize(
    ("profile", "gpu", "message"),
    [
        ("gpu", None, "profile gpu needs a GPU, and this machine has none.*--profile cpu or cpu_int8"),
        (
            "gpu_fp16",
            "NVIDIA L4 8.9",
            "profile gpu_fp16 needs.*backend `tensorrt`.*NVIDIA's Triton container",
        ),
    ],
)
def test_what_this_machine_cannot_serve_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, profile: str, gpu: str | None, message: str
) -> None:
    monkeypatch.setattr(server_module, "check_repository", lambda *_: None)
    monkeypatch.setattr(Machine, "here", lambda: Machine(gpu, "10.13.3"))
    with pytest.raises(ServerError, match=message):
        TritonServer(ServerOptions(Path("unused"), profile=profile))
