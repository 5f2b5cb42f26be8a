"""The flows of CosyVoice 2 and 3 against the official ones, as PyTorch module and as ONNX graph."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE2, COSYVOICE3, FAMILIES
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.spec import Feed
from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow import FLOWS
from cosytriton_export.flow.encoder import relative_positions, relative_shift
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.flow.masks import attention_bias
from cosytriton_export.flow.solver import NOISE_FRAMES, STEPS, fixed_noise
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import Config, load_hyperyaml

Array = npt.NDArray[Any]
Run = Callable[[Feed], list[Array]]

GOLDEN = Path(__file__).parents[1] / "golden"
MEL_TOLERANCE = {"cosyvoice2": 2e-5, "cosyvoice3": 3e-5}  # of values up to 5.5
LAYER_TOLERANCE = 5e-5  # CPUs of two makers differ by 2e-5
ROW_TOLERANCE = 1e-5  # between a row in a batch and the row alone
STRIDE = 2  # mel frames of a token
PROMPT = 13  # tokens of the golden reference

ESTIMATOR = "decoder.estimator"
# Golden tensor: the module that gives it, and in which call; the estimator is called once a step.
BOTH_LAYERS = {
    "full.spks": ("spk_embed_affine_layer", 0),
    "full.step1_out": (ESTIMATOR, 0),
    "full.step6_out": (ESTIMATOR, 5),
    "stream.step1_out": (ESTIMATOR, 0),
}
LAYERS = {
    COSYVOICE2.name: BOTH_LAYERS
    | {
        "full.enc_embed": ("encoder.embed.out", 0),
        "full.enc_prelook": ("encoder.pre_lookahead_layer", 0),
        "full.enc_layers": ("encoder.encoders.1", 0),
        "full.enc_up": ("encoder.up_layer.conv", 0),
        "full.enc_out": ("encoder.after_norm", 0),
        "stream.enc_out": ("encoder.after_norm", 0),
        "full.down0_res": (f"{ESTIMATOR}.down_blocks.0.0", 5),
        "full.down0_tf0": (f"{ESTIMATOR}.down_blocks.0.1.0", 5),
        "full.mid_last": (f"{ESTIMATOR}.mid_blocks.1.1.1", 5),
        "full.up0_res": (f"{ESTIMATOR}.up_blocks.0.0", 5),
        "full.final_block": (f"{ESTIMATOR}.final_block", 5),
    },
    COSYVOICE3.name: BOTH_LAYERS
    | {
        "full.prelook": ("pre_lookahead_layer", 0),
        "stream.prelook": ("pre_lookahead_layer", 0),
        "full.input_embed": (f"{ESTIMATOR}.input_embed", 5),
        "full.block0_attn": (f"{ESTIMATOR}.transformer_blocks.0.attn", 5),
        "full.block0": (f"{ESTIMATOR}.transformer_blocks.0", 5),
        "stream.block0": (f"{ESTIMATOR}.transformer_blocks.0", 5),
        "full.norm_out": (f"{ESTIMATOR}.norm_out", 5),
    },
}
TIME_LAYER = {COSYVOICE2.name: f"{ESTIMATOR}.time_mlp", COSYVOICE3.name: f"{ESTIMATOR}.time_embed"}
TIME_WEIGHTS = {COSYVOICE2.name: r"\.time_mlp\.", COSYVOICE3.name: r"\.(time_embed|attn_norm|norm_out)\."}


class Case:
    """The golden flow of one family."""

    def __init__(self, family: str, golden: Callable[[str], Any], folder: Path) -> None:
        self.family = family
        version = family[-1]
        self.golden = golden(f"flow_v{version}")
        self.weights = {k: torch.from_numpy(v) for k, v in golden(f"flow_v{version}_weights").items()}
        self.config: Config = load_hyperyaml(GOLDEN / f"{family}_tiny.yaml")["flow"]
        self.stage = pipeline_of(FAMILIES[family]).flow
        self.folder = folder

    def build(self, weights: dict[str, Tensor]) -> CausalFlow:
        flow = FLOWS[self.family].from_config(self.config, weights, "flow.pt")
        assert isinstance(flow, CausalFlow)
        return flow.requires_grad_(False)

    @cached_property
    def flow(self) -> CausalFlow:
        return self.build(self.weights)

    @cached_property
    def graph(self) -> Path:
        path = self.folder / "model.onnx"
        export_stage(self.stage, self.flow, path)
        return path

    @cached_property
    def session(self) -> ort.InferenceSession:
        return ort.InferenceSession(self.graph)

    @cached_property
    def captured(self) -> dict[str, dict[str, list[Tensor]]]:
        """What the modules give in the golden runs: mode -> module (or its input) -> one entry a call."""
        return {mode: self._capture(mode) for mode in ("full", "stream")}

    def _capture(self, mode: str) -> dict[str, list[Tensor]]:
        flow, found = self.build(self.weights), defaultdict[str, list[Tensor]](list)
        for name in {TIME_LAYER[self.family], *(name for name, _ in LAYERS[self.family].values())}:

            def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                found[name].append(output)
                found[f"{name}.input"].append(inputs[0])

            flow.get_submodule(name).register_forward_hook(keep)
        flow.decoder.fix_times()
        feed = self.feed(40, streaming=mode == "stream", finalize=1)
        flow(*(torch.from_numpy(array) for array in feed.values()))
        return found

    def feed(self, tokens: int, streaming: int, finalize: int, prompt: int = PROMPT) -> Feed:
        """One row without padding (a reference of 0 tokens still has one padded token)."""
        kept = max(prompt, 1)
        return {
            "tokens": self.golden["token"][:, :tokens],
            "token_count": np.array([[tokens]], np.int32),
            "prompt_tokens": self.golden["prompt_token"][:, :kept],
            "prompt_token_count": np.array([[prompt]], np.int32),
            "prompt_mel": self.golden["prompt_feat"][:, : STRIDE * kept],
            "speaker_embedding": self.golden["embedding"],
            "streaming": np.array([[bool(streaming)]]),
            "finalize": np.array([[bool(finalize)]]),
        }

    def assert_mel(self, name: str, outputs: list[Array], first: int = 0) -> None:
        """The frames from `first` on are the golden ones [1, M, T]; everything after the count is zero."""
        mel, count = outputs[0], int(outputs[1].item())
        self.golden.assert_close(name, mel[:, first:count].swapaxes(1, 2), atol=MEL_TOLERANCE[self.family])
        assert not mel[:, count:].any()


@pytest.fixture(scope="module")
def cases(golden: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {family: Case(family, golden, tmp_path_factory.mktemp(family)) for family in LAYERS}


@pytest.fixture(scope="module", params=list(LAYERS))
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


# Every export compares its graph with the module; these take minutes to trace: `make full`.
ONNX = pytest.param("onnx", marks=pytest.mark.full)


@pytest.fixture(params=["torch", ONNX])
def run(request: pytest.FixtureRequest, case: Case) -> Run:
    names = [tensor.name for tensor in case.stage.inputs]
    if request.param == "torch":
        return lambda feed: [t.numpy() for t in case.flow(*(torch.from_numpy(feed[n]) for n in names))]
    return lambda feed: case.session.run(None, feed)


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


@pytest.mark.parametrize(("streaming", "name"), [(0, "full.mel"), (1, "stream.mel")])
def test_whole_sentence(run: Run, case: Case, streaming: int, name: str) -> None:
    case.assert_mel(name, run(case.feed(40, streaming, finalize=1)))


def test_without_reference(run: Run, case: Case) -> None:
    case.assert_mel("noprompt.mel", run(case.feed(30, streaming=0, finalize=1, prompt=0)))


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_official_chunk_schedule(run: Run, case: Case, chunk: int) -> None:
    tokens, offset, streaming, finalize = case.golden[f"chunk{chunk}.sched"].tolist()
    outputs = run(case.feed(tokens, streaming, finalize))
    lookahead = FAMILIES[case.family].lookahead
    assert outputs[1].item() == STRIDE * (tokens - (0 if finalize else lookahead))
    case.assert_mel(f"chunk{chunk}.mel_new", outputs, STRIDE * offset)


def test_row_of_a_mixed_batch_equals_the_row_alone(run: Run, case: Case) -> None:
    alone = [
        case.feed(40, streaming=0, finalize=1),
        case.feed(17, streaming=1, finalize=0, prompt=7),
        case.feed(33, streaming=1, finalize=1, prompt=0),
        case.feed(29, streaming=0, finalize=0, prompt=0),
    ]
    mel, counts = run(pad_rows(alone))
    for row, feed in enumerate(alone):
        expected, (count,) = (output[0] for output in run(feed))
        assert counts[row] == count
        np.testing.assert_allclose(mel[row, :count], expected[:count], atol=ROW_TOLERANCE, rtol=0)
        assert not mel[row, count:].any()


def test_longer_reference_mel_than_tokens_is_cut(run: Run, case: Case) -> None:
    feed = case.feed(20, streaming=1, finalize=0)
    longer = feed | {"prompt_mel": np.pad(feed["prompt_mel"], ((0, 0), (0, 99), (0, 0)), constant_values=3)}
    np.testing.assert_array_equal(run(longer)[0], run(feed)[0])


def test_count_of_zero_does_not_crash(run: Run, case: Case) -> None:
    feed = case.feed(4, streaming=1, finalize=0, prompt=0)
    mel, count = run(feed | {"token_count": np.zeros((1, 1), np.int32)})
    assert count.item() == 0
    assert not mel.any()


@pytest.mark.parametrize(
    ("case", "key"),
    [(family, key) for family, layers in LAYERS.items() for key in layers],
    indirect=["case"],
)
def test_layers(case: Case, key: str) -> None:
    name, call = LAYERS[case.family][key]
    calls = case.captured[key.split(".")[0]][name]
    assert len(calls) == (STEPS if name.startswith(ESTIMATOR) else 1)
    case.golden.assert_close(key, calls[call], atol=LAYER_TOLERANCE)


def test_state_of_the_solver(case: Case) -> None:
    doubled = case.captured["full"][f"{ESTIMATOR}.input"][5]
    case.golden.assert_close("full.step6_x", doubled[:1, :80], atol=LAYER_TOLERANCE)


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_estimate_from_the_tokens_alone(case: Case, mode: str) -> None:
    ids = torch.from_numpy(
        np.concatenate((case.golden["prompt_token"], case.golden["token"][:, :40]), axis=1)
    ).long()
    given = torch.tensor([[ids.shape[1]]])
    mu = case.flow.encode(ids, given, given, torch.tensor([[mode == "stream"]]))
    case.golden.assert_close(f"{mode}.mu", mu, atol=LAYER_TOLERANCE)


def test_times(case: Case) -> None:
    np.testing.assert_array_equal(case.flow.decoder.times, case.golden["full.t_used"])
    ends = case.flow.decoder.times + case.flow.decoder.steps
    case.golden.assert_close("full.t_span", torch.cat((torch.zeros(1), ends)), atol=1e-7)
    (embedded,) = case.captured["full"][TIME_LAYER[case.family]]
    case.golden.assert_close("full.time_emb", embedded[5].expand(2, -1), atol=LAYER_TOLERANCE)


def test_noise_is_the_official_one(golden: Callable[[str], Any], case: Case) -> None:
    head = golden("cfm_rand_noise_head")
    noise = case.flow.decoder.noise
    assert noise.shape == (1, 80, NOISE_FRAMES)
    head.assert_close("rand_noise_first_240_frames", noise[:, :, :240], atol=0)
    head.assert_close("ch0_first_4096", noise[0, 0, :4096], atol=0)
    head.assert_close("last_row_tail", noise[0, 79, -64:], atol=0)
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


@pytest.mark.full
def test_graph_holds_the_estimator_once_in_a_loop_without_its_time_layers(case: Case) -> None:
    model = onnx.load(case.graph)
    assert [node.op_type for node in model.graph.node].count("Loop") == 1
    weights = [v for k, v in case.flow.named_parameters() if not re.search(TIME_WEIGHTS[case.family], k)]
    needed = sum(t.numel() * t.element_size() for t in (*weights, case.flow.decoder.noise))
    assert case.graph.stat().st_size < 1.05 * needed


def test_times_embedded_while_it_speaks_give_the_same(case: Case) -> None:
    """As while the weights still change."""
    flow = case.build(case.weights)
    arguments = [torch.from_numpy(array) for array in case.feed(9, streaming=0, finalize=1).values()]
    mel, _ = flow(*arguments)
    flow.decoder.embedded_times = None
    torch.testing.assert_close(flow(*arguments)[0], mel, atol=0, rtol=0)


def test_every_key_is_consumed_and_no_other(case: Case) -> None:
    assert case.flow.state_dict().keys() == case.weights.keys()
    with pytest.raises(CheckpointError, match=r"unknown keys: decoder\.rest"):
        case.build(case.weights | {"decoder.rest": torch.zeros(1)})
    lacking = {k: v for k, v in case.weights.items() if k != "spk_embed_affine_layer.bias"}
    with pytest.raises(CheckpointError, match=r"missing keys: spk_embed_affine_layer\.bias"):
        case.build(lacking)


def test_unet_that_changes_its_rate_is_refused(cases: dict[str, Case]) -> None:
    case = cases[COSYVOICE2.name]
    config = copy.deepcopy(case.config)
    config["decoder"]["estimator"]["channels"] = [256, 256]
    with pytest.raises(CheckpointError, match="only one width"):
        FLOWS[case.family].from_config(config, case.weights, "flow.pt")
