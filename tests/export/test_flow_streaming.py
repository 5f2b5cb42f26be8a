"""The flow for streams against the flow that computes everything at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE2, COSYVOICE3, FAMILIES
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_export.flow import FLOWS
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.flow.solver import STEPS
from cosytriton_export.flow.streaming import StreamingFlow
from cosytriton_export.flow.streaming_graph import export_streaming_flow
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.parity_flow import measure_streaming_flow

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-5  # of mel up to 5.5
STRIDE, BLOCK = 2, 25  # frames of a token, tokens of a block
PROMPT, TOKENS = 30, 50
TOTAL = PROMPT + TOKENS
# Tokens, with the reference's, at the end of each chunk. The first two blocks are reference, or lie across.
CUTS = [[TOTAL], [25, TOTAL], [50, TOTAL], [25, 50, 75, TOTAL], [75, 76]]


@pytest.fixture(scope="module", params=[COSYVOICE2.name, COSYVOICE3.name])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def flow(family: str, golden: Callable[[str], Any]) -> CausalFlow:
    weights = {k: torch.from_numpy(v) for k, v in golden(f"flow_v{family[-1]}_weights").items()}
    config = load_hyperyaml(GOLDEN / f"{family}_tiny.yaml")["flow"]
    built = FLOWS[family].from_config(config, weights, "flow.pt").requires_grad_(False)
    assert isinstance(built, CausalFlow)
    return built


@pytest.fixture(scope="module")
def said() -> list[Tensor]:
    """All of a piece of speech, in the order of the inputs."""
    generator = torch.Generator().manual_seed(1)
    tokens, prompt = (torch.randint(0, 6561, (1, n), generator=generator).int() for n in (TOKENS, PROMPT))
    mel = torch.randn(1, STRIDE * PROMPT, 80, generator=generator)
    counts = [torch.tensor([[n]], dtype=torch.int32) for n in (TOKENS, PROMPT)]
    return [tokens, counts[0], prompt, counts[1], mel, torch.randn(1, 192, generator=generator)]


def known(said: Sequence[Tensor], count: int) -> list[Tensor]:
    """What is known when the speech has `count` tokens; one of padding stands for none."""
    return [said[0][:, : max(count, 1)], torch.tensor([[count]], dtype=torch.int32), *said[2:]]


def speak(module: StreamingFlow, said: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
    """The frames [T, 80] of reference and speech, chunk by chunk."""
    attention, convolution = module.state.empty()
    mels = []
    for end in ends:
        ahead = min(end + module.flow.lookahead, ends[-1]) - PROMPT
        token_end = torch.tensor([[end]], dtype=torch.int32)
        mel, added, convolution = module.resume(known(said, max(ahead, 0)), token_end, attention, convolution)
        attention = [torch.cat(states) for states in zip(attention, added, strict=True)]
        mels.append(mel[0])
    assert attention[0].shape == (STRIDE * ends[-1], STEPS, 2, module.state.width)
    return torch.cat(mels)


@pytest.mark.parametrize("ends", CUTS)
def test_stream_equals_the_whole_however_it_is_cut(
    flow: CausalFlow, said: list[Tensor], ends: list[int]
) -> None:
    yes = torch.tensor([[True]])
    whole, count = flow(*known(said, ends[-1] - PROMPT), yes, yes)
    mel = speak(StreamingFlow(flow), said, ends)
    torch.testing.assert_close(mel[STRIDE * PROMPT :], whole[0, : count.item()], atol=TOLERANCE, rtol=0)


def test_later_frames_need_the_state(flow: CausalFlow, said: list[Tensor]) -> None:
    """Each part of it changes them, so that the test above would notice a wrong one."""
    module = StreamingFlow(flow)
    end, later = (torch.tensor([[n]], dtype=torch.int32) for n in (BLOCK, 2 * BLOCK))
    attention, convolution = module.state.empty()
    _, attention, convolution = module.resume(known(said, 0), end, attention, convolution)
    right, *_ = module.resume(said, later, attention, convolution)
    for layer in (0, -1):
        wrong = list(attention)
        wrong[layer] = wrong[layer].flip(1)  # those of other steps
        assert (module.resume(said, later, wrong, convolution)[0] - right).abs().max() > 10 * TOLERANCE
    wrong_convolution = module.resume(said, later, attention, torch.zeros_like(convolution))[0]
    assert (wrong_convolution - right).abs().max() > 10 * TOLERANCE


@pytest.mark.full
def test_graph_equals_the_flow_at_once(family: str, flow: CausalFlow, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_streaming_flow(flow, path)
    assert measure_streaming_flow(flow, pipeline_of(FAMILIES[family]), path, TOLERANCE)
