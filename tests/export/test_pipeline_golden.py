"""Speech tokens to samples through flow and vocoder, against the official one-shot and streamed speech."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import nn

from cosytriton_ensemble.pipeline import COSYVOICE2, FLOW, PROMPT_TOKENS, TOKENS, VOCODER
from cosytriton_ensemble.spec import Feed, Stage
from cosytriton_ensemble.streaming import ChunkSchedule, ChunkVocoder, FlowCall
from cosytriton_export.flow import Flow
from cosytriton_export.graph import export_stage
from cosytriton_export.hift import HiftConfig, Vocoder
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.weights import fold_weight_norm, load_weights

Array = npt.NDArray[Any]
Run = Callable[[Feed], list[Array]]

GOLDEN = Path(__file__).parents[1] / "golden"
# The exponential of the magnitudes amplifies an error of the source. With a float64 phase these chunks differ
# from the official ones, whose phase is unwrapped float32, by 1.6e-2 (4.8e-4 rms); so they do with ours.
TOLERANCE = 3e-2  # of a sample
RMS_TOLERANCE = 1e-3  # of a signal whose rms is 0.09
STREAMED = 100  # tokens of the streamed request
ONE_SHOT = 40  # tokens of the other one


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    return load_arrays(GOLDEN / "pipeline_v2.safetensors")


@pytest.fixture(scope="module")
def modules() -> dict[str, nn.Module]:
    """The stages with the official weights; the vocoder has the noise table of the golden run."""
    config = load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")
    noise = load_file(GOLDEN / "hift_noise_tables.safetensors")["normal_table"]
    vocoder = Vocoder(HiftConfig.from_yaml(config["hift"]), noise)
    weights = fold_weight_norm(load_file(GOLDEN / "hift_v2_weights.safetensors"))
    load_weights(vocoder, weights, "hift_v2_weights.safetensors")
    weights = load_file(GOLDEN / "flow_v2_weights.safetensors")
    flow = Flow.from_config(config["flow"], weights, "flow_v2_weights.safetensors")
    return {"flow": flow.eval(), "vocoder": vocoder.eval()}


@pytest.fixture(scope="module")
def sessions(
    modules: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ort.InferenceSession]:
    folder, made = tmp_path_factory.mktemp("pipeline"), {}
    for stage in (FLOW, VOCODER):
        path = folder / f"{stage.name}.onnx"
        export_stage(stage, modules[stage.name], path)
        made[stage.name] = ort.InferenceSession(path)
    return made


@pytest.fixture(params=["torch", "onnx"])
def run(request: pytest.FixtureRequest, modules: dict[str, nn.Module]) -> Callable[[Stage], Run]:
    """Gives the function that runs a stage."""
    if request.param == "torch":

        def compute(stage: Stage, feed: Feed) -> list[Array]:
            with torch.no_grad():
                outputs = modules[stage.name](*(torch.from_numpy(feed[t.name]) for t in stage.inputs))
            return [output.numpy() for output in outputs]

        return lambda stage: lambda feed: compute(stage, feed)
    sessions: dict[str, ort.InferenceSession] = request.getfixturevalue("sessions")
    return lambda stage: lambda feed: sessions[stage.name].run(None, feed)


def pad(ids: Array, size: int) -> Array:
    """One row of ids on the padding grid, INT32 [1, size]."""
    return np.pad(ids.reshape(1, -1), ((0, 0), (0, size - ids.size))).astype(np.int32)


def flow_feed(golden: dict[str, Array], call: FlowCall) -> Feed:
    """A call of the flow as it is served: padded to the grids of the stage's dimensions."""
    prompt_count = golden["prompt_token"].size
    prompt_size = PROMPT_TOKENS.padded(prompt_count)
    missing = prompt_size * COSYVOICE2.frames_per_token - golden["prompt_feat"].shape[1]
    return {
        "tokens": pad(golden["token"][0, : call.tokens], TOKENS.padded(call.tokens)),
        "token_count": np.array([[call.tokens]], np.int32),
        "prompt_tokens": pad(golden["prompt_token"], prompt_size),
        "prompt_token_count": np.array([[prompt_count]], np.int32),
        "prompt_mel": np.pad(golden["prompt_feat"], ((0, 0), (0, missing), (0, 0))),
        "speaker_embedding": golden["embedding"],
        "streaming": np.array([[call.streaming]]),
        "finalize": np.array([[call.finalize]]),
    }


def speak(
    run: Callable[[Stage], Run], golden: dict[str, Array], call: FlowCall, vocoder: ChunkVocoder
) -> Array:
    """The samples that one call adds."""
    mel, count = run(FLOW)(flow_feed(golden, call))
    feed = vocoder.feed(mel[0, call.offset * COSYVOICE2.frames_per_token : count[0, 0]])
    feed["noise_offset"][:] = 0  # the golden noise restarts with each call
    waveform, source, _ = run(VOCODER)({name: array[None] for name, array in feed.items()})
    return vocoder.emit(waveform[0], source[0], call.finalize)


def check(speech: Array, wanted: Array) -> None:
    assert speech.shape == wanted.shape
    assert np.abs(speech - wanted).max() < TOLERANCE
    assert np.sqrt(np.mean(np.square(speech - wanted))) < RMS_TOLERANCE


def test_one_shot(run: Callable[[Stage], Run], golden: dict[str, Array]) -> None:
    whole = FlowCall(ONE_SHOT, 0, streaming=False, finalize=True)
    check(speak(run, golden, whole, ChunkVocoder()), golden["nonstream40.wav"][0])


def test_stream(run: Callable[[Stage], Run], golden: dict[str, Array]) -> None:
    schedule = ChunkSchedule(golden["prompt_token"].size)
    # The official window, whose halves sum to 1.08.
    vocoder = ChunkVocoder(window=np.hamming(2 * COSYVOICE2.overlap_samples))
    spoken = 0
    for i in range(3):
        call = schedule.next_call(STREAMED, ended=True)
        assert call is not None
        chunk = speak(run, golden, call, vocoder)
        check(chunk, golden[f"stream.wav{i}"][0])
        spoken += len(chunk)
    assert schedule.finished
    assert spoken == STREAMED * COSYVOICE2.samples_per_token
