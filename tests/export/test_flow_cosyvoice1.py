"""The flow against the official one of CosyVoice 1, as PyTorch module and as ONNX graph."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_ensemble.spec import Dim, Feed, Stage
from cosytriton_ensemble.spec import Tensor as Declared
from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow.cosyvoice1 import MaskedDiffFlow
from cosytriton_export.flow.solver import STEPS, fixed_noise
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import load_hyperyaml

if TYPE_CHECKING:
    from tests.conftest import Golden

Array = npt.NDArray[Any]
Run = Callable[[Feed], list[Array]]
Captured = dict[str, list[Tensor]]

CONFIG = Path(__file__).parents[1] / "golden" / "cosyvoice_tiny.yaml"
MEL_TOLERANCE = 1e-5  # of values up to 4.2
LAYER_TOLERANCE = 1e-5
ROW_TOLERANCE = 1e-5  # between a row in a batch and the row alone
PROMPT, PROMPT_FRAMES, FADE = 30, 51, COSYVOICE1.fade_frames
STREAM = 200  # frames: where in the noise table of these tests the golden stream begins

TOKENS, PROMPT_TOKENS = Dim("tokens", 1, 60, 200), Dim("prompt_tokens", 1, 30, 100)
FRAMES, REFERENCE_FRAMES = Dim("frames", 1, 103, 344), Dim("prompt_frames", 1, 51, 172)
CACHE, CACHE_OUT = Dim("cache", 1, 85, 206), Dim("cache_out", 35, 85, 206)
STAGE = Stage(
    "flow",
    (
        Declared("tokens", "INT32", (TOKENS,), high=251),
        Declared("token_count", "INT32", (1,), counts=TOKENS),
        Declared("prompt_tokens", "INT32", (PROMPT_TOKENS,), high=251),
        Declared("prompt_token_count", "INT32", (1,), counts=PROMPT_TOKENS),
        Declared("prompt_mel", "FP32", (REFERENCE_FRAMES, 80)),
        Declared("prompt_frame_count", "INT32", (1,), counts=REFERENCE_FRAMES),
        Declared("speaker_embedding", "FP32", (192,)),
        Declared("noise_offset", "INT32", (1,), high=1000),
        Declared("mu_cache", "FP32", (CACHE, 80)),
        Declared("mu_cache_count", "INT32", (1,), counts=CACHE),
    ),
    (
        Declared("mel", "FP32", (FRAMES, 80)),
        Declared("frame_count", "INT32", (1,)),
        Declared("mu_cache_out", "FP32", (CACHE_OUT, 80)),
    ),
)


@pytest.fixture(scope="module")
def gold(golden: Callable[[str], Golden]) -> Golden:
    return golden("flow_v1")


@pytest.fixture(scope="module")
def weights(golden: Callable[[str], Golden]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in golden("flow_v1_weights").items()}


@pytest.fixture(scope="module")
def flow(weights: dict[str, Tensor], gold: Golden) -> MaskedDiffFlow:
    """The flow with the golden noise in its table: from 0 that of one call, from `STREAM` that of the stream.

    The reference has the first frames in both; the stream's second chunk is fresh behind the shared frames.
    """
    flow = MaskedDiffFlow.from_config(load_hyperyaml(CONFIG)["flow"], weights, "flow_v1_weights")
    table, whole, fresh = flow.decoder.noise, *(torch.from_numpy(gold[k]) for k in ("full.z", "chunk1.noise"))
    first = PROMPT_FRAMES + COSYVOICE1.frames(50)  # end of the first chunk
    table[:, :, : whole.shape[2]] = whole
    stream = torch.cat((whole[:, :, PROMPT_FRAMES:first], fresh[:, :, PROMPT_FRAMES + FADE : 119]), dim=2)
    table[:, :, PROMPT_FRAMES + STREAM :][:, :, : stream.shape[2]] = stream
    return flow.requires_grad_(False)


@pytest.fixture(scope="module")
def graph(flow: MaskedDiffFlow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flow") / "model.onnx"
    export_stage(STAGE, flow, path)
    return path


# Every export compares its graph with the module; this one takes minutes to trace: `make full`.
ONNX = pytest.param("onnx", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=["torch", ONNX])
def run(request: pytest.FixtureRequest, flow: MaskedDiffFlow) -> Run:
    if request.param == "torch":
        return lambda feed: [t.numpy() for t in flow(*(torch.from_numpy(feed[i.name]) for i in STAGE.inputs))]
    session = ort.InferenceSession(request.getfixturevalue("graph"))
    return lambda feed: session.run(None, feed)


def make_feed(gold: Golden, first: int, end: int, offset: int = 0, cache: Array | None = None) -> Feed:
    """One row without padding that speaks the golden tokens `first` to `end`."""
    return {
        "tokens": gold["token"][:, first:end],
        "token_count": np.array([[end - first]], np.int32),
        "prompt_tokens": gold["prompt_token"],
        "prompt_token_count": np.array([[PROMPT]], np.int32),
        "prompt_mel": gold["prompt_feat"],
        "prompt_frame_count": np.array([[PROMPT_FRAMES]], np.int32),
        "speaker_embedding": gold["embedding"],
        "noise_offset": np.array([[offset]], np.int32),
        "mu_cache": np.zeros((1, 1, 80), np.float32) if cache is None else cache,
        "mu_cache_count": np.array([[0 if cache is None else cache.shape[1]]], np.int32),
    }


def with_reference(feed: Feed, tokens: int, frames: int) -> Feed:
    """Shorten the reference; without one there is still one entry of padding."""
    return feed | {
        "prompt_tokens": feed["prompt_tokens"][:, : max(tokens, 1)],
        "prompt_token_count": np.array([[tokens]], np.int32),
        "prompt_mel": feed["prompt_mel"][:, : max(frames, 1)],
        "prompt_frame_count": np.array([[frames]], np.int32),
    }


def pad_rows(feeds: list[Feed]) -> Feed:
    """One batch of the rows; the padding is garbage that must not matter."""
    extents = {"tokens": 75, "prompt_tokens": 37, "prompt_mel": 60, "mu_cache": 99}
    garbage = {"tokens": 77, "prompt_tokens": -5, "prompt_mel": 9.0, "mu_cache": -7.0}
    rows: dict[str, list[Array]] = defaultdict(list)
    for feed in feeds:
        for name, array in feed.items():
            more = extents.get(name, array.shape[1]) - array.shape[1]
            width = [(0, 0), (0, more), (0, 0)][: array.ndim]
            rows[name].append(np.pad(array, width, constant_values=garbage.get(name, 0)))
    return {name: np.concatenate(arrays) for name, arrays in rows.items()}


def assert_cache(flow: MaskedDiffFlow, gold: Golden, name: str, mu: Array, position: int) -> None:
    """The encoder's output and the noise that the table has for the same frames are the official cache.

    `position` is that of the row's last 34 frames in the utterance.
    """
    places = [*range(PROMPT_FRAMES), *range(PROMPT_FRAMES + position, PROMPT_FRAMES + position + FADE)]
    official = np.stack((flow.decoder.noise[:, :, places].numpy(), mu.swapaxes(1, 2)), axis=3)
    gold.assert_close(name, official, atol=MEL_TOLERANCE)


def test_long_sentence(run: Run, flow: MaskedDiffFlow, gold: Golden) -> None:
    mel, count, mu = run(make_feed(gold, 0, 70))
    assert count.item() == 120
    gold.assert_close("full.mel", mel.swapaxes(1, 2), atol=MEL_TOLERANCE)
    assert_cache(flow, gold, "full.cache", mu, 120 - FADE)


def test_short_sentence_is_stretched_in_one_piece(run: Run, gold: Golden) -> None:
    gold.assert_close("short.mel", run(make_feed(gold, 0, 35))[0].swapaxes(1, 2), atol=MEL_TOLERANCE)


def test_stream_of_two_chunks(run: Run, flow: MaskedDiffFlow, gold: Golden) -> None:
    mel, count, mu = run(make_feed(gold, 0, 50, STREAM))
    gold.assert_close("chunk0.mel", mel.swapaxes(1, 2), atol=MEL_TOLERANCE)
    second = STREAM + count.item() - FADE
    assert_cache(flow, gold, "chunk0.cache", mu, second)

    mel, count, mu = run(make_feed(gold, 30, 70, second, mu))
    gold.assert_close("chunk1.mel", mel.swapaxes(1, 2), atol=MEL_TOLERANCE)
    assert_cache(flow, gold, "chunk1.cache", mu, second + count.item() - FADE)


def test_row_of_a_mixed_batch_equals_the_row_alone(run: Run, gold: Golden) -> None:
    """Short and long, odd and even, with and without reference and chunk before."""
    cache = run(make_feed(gold, 0, 50))[2]
    alone = [
        make_feed(gold, 0, 70, offset=3),
        with_reference(make_feed(gold, 5, 38), 7, 12),
        with_reference(make_feed(gold, 0, 44, offset=60), 0, 0),
        make_feed(gold, 20, 60, offset=172, cache=cache),
        with_reference(make_feed(gold, 0, 20, cache=cache[:, -FADE:]), 0, 0),
        with_reference(make_feed(gold, 0, 41), 30, 50),
    ]
    frames = [f["prompt_frame_count"].item() + COSYVOICE1.frames(f["token_count"].item()) for f in alone]
    assert {total % 2 for total in frames} == {0, 1}
    mel, counts, mu = run(pad_rows(alone))
    for row, feed in enumerate(alone):
        expected, (count,), cached = (output[0] for output in run(feed))
        kept = feed["prompt_frame_count"].item() + FADE
        assert counts[row] == count == len(expected)
        np.testing.assert_allclose(mel[row, :count], expected, atol=ROW_TOLERANCE, rtol=0)
        np.testing.assert_allclose(mu[row, :kept], cached[:kept], atol=ROW_TOLERANCE, rtol=0)
        assert not mel[row, count:].any()
        assert not mu[row, kept:].any()


def test_without_reference(run: Run, flow: MaskedDiffFlow, gold: Golden) -> None:
    """A reference of padding alone is as no reference at all."""
    feed = with_reference(make_feed(gold, 0, 50), 0, 0)
    nothing = feed | {name: feed[name][:, :0] for name in ("prompt_tokens", "prompt_mel")}
    expected = flow(*(torch.from_numpy(nothing[tensor.name]) for tensor in STAGE.inputs))
    mel, count, mu = run(feed)
    assert count.item() == mel.shape[1]
    np.testing.assert_allclose(mel, expected[0], atol=ROW_TOLERANCE, rtol=0)
    np.testing.assert_allclose(mu[:, :FADE], expected[2], atol=ROW_TOLERANCE, rtol=0)


def test_frame_starts_from_the_same_noise_in_every_chunk(flow: MaskedDiffFlow) -> None:
    prompt, offsets = torch.tensor([[2], [0]]), torch.tensor([[0], [3]])
    noise = flow.noise(prompt, offsets, 6)
    wanted = flow.decoder.noise[0].T
    torch.testing.assert_close(noise[0], wanted[:6], atol=0, rtol=0)
    torch.testing.assert_close(noise[1], wanted[3:9], atol=0, rtol=0)
    torch.testing.assert_close(flow.noise(prompt, offsets + 15_000, 6)[1], wanted[3:9], atol=0, rtol=0)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_tiny_counts_do_not_crash(run: Run, gold: Golden, tokens: int) -> None:
    feed = with_reference(make_feed(gold, 0, 4), 0, 0) | {"token_count": np.array([[tokens]], np.int32)}
    mel, count, mu = run(feed)
    assert count.item() == COSYVOICE1.frames(tokens)
    assert np.isfinite(mel).all()
    assert np.isfinite(mu).all()
    assert not mel[:, count.item() :].any()


@pytest.fixture(scope="module")
def captured(flow: MaskedDiffFlow, gold: Golden) -> Captured:
    """What the layers give in the golden run, one entry a call; the estimator is called once a step."""
    flow = copy.deepcopy(flow)
    estimator: Any = flow.decoder.estimator
    layers: dict[str, nn.Module] = {
        "enc_out": flow.encoder.after_norm,
        "regulated": flow.length_regulator,
        "spks": flow.spk_embed_affine_layer,
        "down0_res": estimator.down_blocks[0][0],
        "down0_down": estimator.down_blocks[0][2],
        "mid_last": estimator.mid_blocks[-1][1][-1],
        "up0_up": estimator.up_blocks[0][2],
        "velocity": estimator,
    }
    found: Captured = defaultdict(list)

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name].append(output)
            found[f"{name}.input"].append(inputs[0])

        return hook

    for name, layer in layers.items():
        layer.register_forward_hook(keep(name))
    flow(*(torch.from_numpy(array) for array in make_feed(gold, 0, 70).values()))
    return found


@pytest.mark.parametrize("name", ["enc_out", "regulated", "spks"])
def test_encoder_layers(captured: Captured, gold: Golden, name: str) -> None:
    gold.assert_close(f"full.{name}", captured[name][0], atol=LAYER_TOLERANCE)


@pytest.mark.parametrize("name", ["down0_res", "down0_down", "mid_last", "up0_up"])
def test_estimator_layers_at_step_6(captured: Captured, gold: Golden, name: str) -> None:
    assert len(captured[name]) == STEPS
    gold.assert_close(f"full.{name}", captured[name][5], atol=LAYER_TOLERANCE)


def test_solver_states(captured: Captured, gold: Golden) -> None:
    velocity, states = captured["velocity"], captured["velocity.input"]
    gold.assert_close("full.mu", states[0][:1, 80:160], atol=LAYER_TOLERANCE)
    gold.assert_close("full.step1_out", velocity[0], atol=LAYER_TOLERANCE)
    gold.assert_close("full.step6_x", states[5][:1, :80], atol=LAYER_TOLERANCE)
    gold.assert_close("full.step6_out", velocity[5], atol=LAYER_TOLERANCE)


@pytest.mark.full
def test_graph_holds_the_estimator_once_in_a_loop(flow: MaskedDiffFlow, graph: Path) -> None:
    model = onnx.load(graph)
    assert [node.op_type for node in model.graph.node].count("Loop") == 1
    weights = sum(t.numel() * t.element_size() for t in (*flow.parameters(), flow.decoder.noise))
    assert graph.stat().st_size < 1.1 * weights


def test_noise_table_is_that_of_the_other_families(weights: dict[str, Tensor]) -> None:
    flow = MaskedDiffFlow.from_config(load_hyperyaml(CONFIG)["flow"], weights, "flow_v1_weights")
    torch.testing.assert_close(flow.decoder.noise, fixed_noise(80), atol=0, rtol=0)


def test_configuration_that_does_not_fit_is_refused(weights: dict[str, Tensor]) -> None:
    config = load_hyperyaml(CONFIG)["flow"]
    lacking = {key: value for key, value in weights.items() if key != "length_regulator.model.12.bias"}
    with pytest.raises(CheckpointError, match=r"missing keys: length_regulator\.model\.12\.bias"):
        MaskedDiffFlow.from_config(config, lacking, "flow.pt")
    with pytest.raises(CheckpointError, match=r"unknown keys: encoder\.spare"):
        MaskedDiffFlow.from_config(config, weights | {"encoder.spare": torch.zeros(1)}, "flow.pt")
    with pytest.raises(CheckpointError, match="25 speech tokens per second; only 50"):
        MaskedDiffFlow.from_config({**config, "input_frame_rate": 25}, weights, "flow.pt")
