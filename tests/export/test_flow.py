"""The flow against the official one of CosyVoice 2, as PyTorch module and as ONNX graph."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cosytriton_ensemble.pipeline import COSYVOICE2, FLOW
from cosytriton_ensemble.spec import Feed
from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow import Flow
from cosytriton_export.flow.encoder import relative_positions, relative_shift
from cosytriton_export.flow.masks import attention_bias
from cosytriton_export.flow.solver import NOISE_FRAMES, STEPS, fixed_noise
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import load_hyperyaml

Array = npt.NDArray[Any]
Run = Callable[[Feed], list[Array]]

GOLDEN = Path(__file__).parents[1] / "golden"
MEL_TOLERANCE = 2e-5  # of values up to 5.5
LAYER_TOLERANCE = 2e-5
ROW_TOLERANCE = 1e-5  # between a row in a batch and the row alone
STRIDE = COSYVOICE2.frames_per_token
PROMPT = 13  # tokens of the golden reference


def make_flow() -> Flow:
    config = load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")["flow"]
    return Flow.from_config(config, load_file(GOLDEN / "flow_v2_weights.safetensors"), "flow_v2_weights")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "flow_v2.safetensors")


@pytest.fixture(scope="module")
def flow() -> Flow:
    return make_flow().requires_grad_(False)


@pytest.fixture(scope="module")
def graph(flow: Flow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flow") / "model.onnx"
    export_stage(FLOW, flow, path)
    return path


@pytest.fixture(scope="module", params=["torch", "onnx"])
def run(request: pytest.FixtureRequest, flow: Flow) -> Run:
    if request.param == "torch":
        return lambda feed: [t.numpy() for t in flow(*(torch.from_numpy(feed[i.name]) for i in FLOW.inputs))]
    session = ort.InferenceSession(request.getfixturevalue("graph"))
    return lambda feed: session.run(None, feed)


def make_feed(
    golden: dict[str, Tensor], tokens: int, streaming: int, finalize: int, prompt: int = PROMPT
) -> Feed:
    """One row without padding (a reference of 0 tokens still has one padded token)."""
    kept = max(prompt, 1)
    return {
        "tokens": golden["token"][:, :tokens].numpy(),
        "token_count": np.array([[tokens]], np.int32),
        "prompt_tokens": golden["prompt_token"][:, :kept].numpy(),
        "prompt_token_count": np.array([[prompt]], np.int32),
        "prompt_mel": golden["prompt_feat"][:, : STRIDE * kept].numpy(),
        "speaker_embedding": golden["embedding"].numpy(),
        "streaming": np.array([[bool(streaming)]]),
        "finalize": np.array([[bool(finalize)]]),
    }


def pad_rows(feeds: list[Feed]) -> Feed:
    """One batch of the rows; the padding is garbage that must not matter."""
    extents = {"tokens": 45, "prompt_tokens": 20, "prompt_mel": 40}
    garbage = {"tokens": 77, "prompt_tokens": -5, "prompt_mel": 9.0}
    rows: dict[str, list[Array]] = defaultdict(list)
    for feed in feeds:
        for name, array in feed.items():
            width = [(0, 0), (0, extents.get(name, array.shape[1]) - array.shape[1])] + [(0, 0)] * (
                array.ndim - 2
            )
            rows[name].append(np.pad(array, width, constant_values=garbage.get(name, 0)))
    return {name: np.concatenate(arrays) for name, arrays in rows.items()}


def assert_mel(outputs: list[Array], expected: Tensor, first: int = 0) -> None:
    """The frames from `first` on are the golden ones [1, M, T]; everything after the count is zero."""
    mel, count = outputs[0], int(outputs[1].item())
    np.testing.assert_allclose(mel[:, first:count], expected.mT.numpy(), atol=MEL_TOLERANCE, rtol=0)
    assert not mel[:, count:].any()


@pytest.mark.parametrize(("streaming", "name"), [(0, "full.mel"), (1, "stream.mel")])
def test_whole_sentence(run: Run, golden: dict[str, Tensor], streaming: int, name: str) -> None:
    assert_mel(run(make_feed(golden, 40, streaming, finalize=1)), golden[name])


def test_without_reference(run: Run, golden: dict[str, Tensor]) -> None:
    assert_mel(run(make_feed(golden, 30, streaming=0, finalize=1, prompt=0)), golden["noprompt.mel"])


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_official_chunk_schedule(run: Run, golden: dict[str, Tensor], chunk: int) -> None:
    tokens, offset, streaming, finalize = golden[f"chunk{chunk}.sched"].tolist()
    outputs = run(make_feed(golden, tokens, streaming, finalize))
    assert outputs[1].item() == STRIDE * (tokens - (0 if finalize else COSYVOICE2.lookahead))
    assert_mel(outputs, golden[f"chunk{chunk}.mel_new"], STRIDE * offset)


def test_row_of_a_mixed_batch_equals_the_row_alone(run: Run, golden: dict[str, Tensor]) -> None:
    alone = [
        make_feed(golden, 40, streaming=0, finalize=1),
        make_feed(golden, 17, streaming=1, finalize=0, prompt=7),
        make_feed(golden, 33, streaming=1, finalize=1, prompt=0),
        make_feed(golden, 29, streaming=0, finalize=0, prompt=0),
    ]
    mel, counts = run(pad_rows(alone))
    for row, feed in enumerate(alone):
        expected, (count,) = (output[0] for output in run(feed))
        assert counts[row] == count
        np.testing.assert_allclose(mel[row, :count], expected[:count], atol=ROW_TOLERANCE, rtol=0)
        assert not mel[row, count:].any()


def test_longer_reference_mel_than_tokens_is_cut(run: Run, golden: dict[str, Tensor]) -> None:
    feed = make_feed(golden, 20, streaming=1, finalize=0)
    longer = feed | {"prompt_mel": np.pad(feed["prompt_mel"], ((0, 0), (0, 99), (0, 0)), constant_values=3)}
    np.testing.assert_array_equal(run(longer)[0], run(feed)[0])


def test_count_of_zero_does_not_crash(run: Run, golden: dict[str, Tensor]) -> None:
    feed = make_feed(golden, 4, streaming=1, finalize=0, prompt=0)
    mel, count = run(feed | {"token_count": np.zeros((1, 1), np.int32)})
    assert count.item() == 0
    assert not mel.any()


@pytest.fixture(scope="module")
def captured(golden: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """What the layers give in the golden run, one entry a call; the estimator is called once a step."""
    flow = make_flow().requires_grad_(False)
    estimator: Any = flow.decoder.estimator
    layers: dict[str, nn.Module] = {
        "enc_embed": flow.encoder.embed.out,
        "enc_prelook": flow.encoder.pre_lookahead_layer,
        "enc_layers": flow.encoder.encoders[-1],
        "enc_up": flow.encoder.up_layer.conv,
        "enc_out": flow.encoder.after_norm,
        "mu": flow.encoder_proj,
        "spks": flow.spk_embed_affine_layer,
        "down0_res": estimator.down_blocks[0][0],
        "down0_tf0": estimator.down_blocks[0][1][0],
        "mid_last": estimator.mid_blocks[-1][1][-1],
        "up0_res": estimator.up_blocks[0][0],
        "final_block": estimator.final_block,
        "velocity": estimator,
    }
    found: dict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name].append(output)
            found[f"{name}.input"].append(inputs[0])

        return hook

    for name, layer in layers.items():
        layer.register_forward_hook(keep(name))
    flow(*(torch.from_numpy(array) for array in make_feed(golden, 40, streaming=0, finalize=1).values()))
    return found


@pytest.mark.parametrize("name", ["enc_embed", "enc_prelook", "enc_layers", "enc_up", "enc_out", "spks"])
def test_encoder_layers(captured: dict[str, list[Tensor]], golden: dict[str, Tensor], name: str) -> None:
    torch.testing.assert_close(captured[name][0], golden[f"full.{name}"], atol=LAYER_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["down0_res", "down0_tf0", "mid_last", "up0_res", "final_block"])
def test_estimator_layers_at_step_6(
    captured: dict[str, list[Tensor]], golden: dict[str, Tensor], name: str
) -> None:
    assert len(captured[name]) == STEPS
    torch.testing.assert_close(captured[name][5], golden[f"full.{name}"], atol=LAYER_TOLERANCE, rtol=0)


def test_solver_states(captured: dict[str, list[Tensor]], golden: dict[str, Tensor]) -> None:
    velocity = captured["velocity"]
    states = [doubled[:1, :80] for doubled in captured["velocity.input"]]
    for got, name in [
        (captured["mu"][0].mT, "mu"),
        (states[0], "z"),
        (velocity[0], "step1_out"),
        (states[1], "step2_x"),
        (states[5], "step6_x"),
        (velocity[5], "step6_out"),
    ]:
        torch.testing.assert_close(got, golden[f"full.{name}"], atol=LAYER_TOLERANCE, rtol=0)


def test_streaming_masks_reach_encoder_and_estimator(flow: Flow, golden: dict[str, Tensor]) -> None:
    ids = torch.cat((golden["prompt_token"], golden["token"][:, :40]), dim=1).long()
    given, streaming = torch.tensor([[ids.shape[1]]]), torch.tensor([[True]])
    mu = flow.encode(ids, given, given, streaming)
    torch.testing.assert_close(mu, golden["stream.mu"], atol=LAYER_TOLERANCE, rtol=0)
    extent = mu.shape[2]
    prompt = flow.prompt(golden["prompt_feat"], torch.tensor([[2 * PROMPT]]), extent)
    conditions = torch.cat((mu, flow.speaker(golden["embedding"])[..., None].expand_as(mu), prompt), dim=1)
    x = flow.decoder.noise[:, :, :extent]
    doubled = torch.cat((torch.cat((x, x)), torch.cat((conditions, 0 * conditions))), dim=1)
    bias = attention_bias(given * STRIDE, streaming, 50, extent).repeat(2, 1, 1, 1)
    time = flow.decoder.estimator.embed_time(flow.decoder.times)[:1]
    velocity = flow.decoder.estimator(doubled, time, bias)
    torch.testing.assert_close(velocity, golden["stream.step1_out"], atol=LAYER_TOLERANCE, rtol=0)


def test_times(flow: Flow, golden: dict[str, Tensor]) -> None:
    torch.testing.assert_close(flow.decoder.times, golden["full.t_used"], atol=0, rtol=0)
    ends = flow.decoder.times + flow.decoder.steps
    torch.testing.assert_close(ends, golden["full.t_span"][1:], atol=1e-7, rtol=0)
    embedded = flow.decoder.estimator.embed_time(flow.decoder.times)[5].expand(2, -1)
    torch.testing.assert_close(embedded, golden["full.time_emb"], atol=LAYER_TOLERANCE, rtol=0)


def test_noise_is_the_official_one(flow: Flow) -> None:
    head = load_file(GOLDEN / "cfm_rand_noise_head.safetensors")
    noise = flow.decoder.noise
    assert noise.shape == (1, 80, NOISE_FRAMES)
    torch.testing.assert_close(noise[:, :, :240], head["rand_noise_first_240_frames"], atol=0, rtol=0)
    torch.testing.assert_close(noise[0, 0, :4096], head["ch0_first_4096"], atol=0, rtol=0)
    torch.testing.assert_close(noise[0, 79, -64:], head["last_row_tail"], atol=0, rtol=0)
    torch.testing.assert_close(fixed_noise(80), noise, atol=0, rtol=0)


def test_relative_shift_picks_the_distance_of_query_and_key() -> None:
    scores = torch.arange(7.0).expand(1, 1, 4, 7)  # column c holds the distance 3 - c
    distance = 3 - relative_shift(scores)[0, 0]
    assert distance.tolist() == [[i - j for j in range(4)] for i in range(4)]
    positions = relative_positions(4, 8, torch.device("cpu"))
    torch.testing.assert_close(positions[:, 0], torch.sin(torch.arange(3.0, -4, -1)))


def test_block_mask() -> None:
    bias = attention_bias(torch.tensor([[5], [3]]), torch.tensor([[True], [False]]), 2, 6)
    visible = (bias[:, 0] == 0).int()
    assert visible[0].sum(dim=1).tolist() == [2, 2, 4, 4, 5, 5]
    assert visible[1].sum(dim=1).tolist() == [3] * 6


def test_graph_holds_the_estimator_once_in_a_loop(flow: Flow, graph: Path) -> None:
    model = onnx.load(graph)
    assert [node.op_type for node in model.graph.node].count("Loop") == 1
    weights = sum(t.numel() * t.element_size() for t in (*flow.parameters(), flow.decoder.noise))
    assert graph.stat().st_size < 1.1 * weights


def test_configuration_that_does_not_fit_is_refused() -> None:
    config = copy.deepcopy(load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")["flow"])
    state = load_file(GOLDEN / "flow_v2_weights.safetensors")
    lacking = {key: value for key, value in state.items() if key != "encoder_proj.bias"}
    with pytest.raises(CheckpointError, match=r"missing keys: encoder_proj\.bias"):
        Flow.from_config(config, lacking, "flow.pt")
    config["decoder"]["estimator"]["channels"] = [256, 256]
    with pytest.raises(CheckpointError, match="only one width"):
        Flow.from_config(config, state, "flow.pt")
