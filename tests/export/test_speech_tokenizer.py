"""The speech tokenizers against the official ones, and in batches of unequal lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from cosytriton_export.speech_tokenizer import SpeechTokenizer, SpeechTokenizerSizes
from cosytriton_export.weights import load_weights

if TYPE_CHECKING:
    from tests.conftest import Golden

TOLERANCE = 2e-5  # of hidden states and projections, whose largest values are about 5; tokens are exact
ROW_MARGIN = 1e-4  # rows alone and in a batch round differently; nearer decisions may differ

SIZES = {
    1: SpeechTokenizerSizes(
        version=1, width=64, layers=2, inner=256, head_width=32, positions=300, codewords=128
    ),
    # Version 3 is version 2 with more blocks: these stand for both.
    2: SpeechTokenizerSizes(version=2, width=64, layers=2, inner=256),
}
FILES = {1: "s3tok_v1_50hz_tiny", 2: "s3tok_v3_25hz_tiny"}


@dataclass
class Official:
    """An official tokenizer: what it computes, and the module with its weights."""

    golden: Golden
    module: SpeechTokenizer
    frames_per_token: int


@pytest.fixture(params=SIZES, ids="version {}".format)
def official(request: pytest.FixtureRequest, golden: Callable[[str], Golden]) -> Official:
    sizes, tensors = SIZES[request.param], golden(FILES[request.param])
    module = SpeechTokenizer(sizes).eval()
    weights = {k.removeprefix("w."): torch.from_numpy(v) for k, v in tensors.items() if k.startswith("w.")}
    load_weights(module, weights, "golden")
    return Official(tensors, module, sizes.frames_per_token)


@pytest.fixture
def features(golden: Callable[[str], Golden]) -> Tensor:
    """The official log-mel features of a recording, [1, 128, 130]."""
    return torch.from_numpy(golden("frontend")["whisper_logmel128"])


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def run(module: SpeechTokenizer, data: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        tokens, count = module(data, lengths)
    return tokens, count


def speechlike(frames: int, seed: int) -> Tensor:
    """Smooth random log-mel features [1, 128, frames]."""
    noise = torch.randn(1, 128, frames + 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool1d(noise, 9, 1) * 2 - 0.4


def ragged_batch(*lengths: int) -> Tensor:
    batch = torch.full((len(lengths), 128, max(lengths)), 3.0)  # loud padding
    for row, length in enumerate(lengths):
        batch[row, :, :length] = speechlike(length, seed=row)
    return batch


def test_tokens_are_the_official_ones(official: Official, features: Tensor) -> None:
    tokens, count = run(official.module, features, counts(features.shape[2]))
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == official.golden["codes"].tolist()
    assert count.tolist() == [official.golden["hidden_len"].tolist()]


def test_hidden_states_are_the_official_ones(official: Official, features: Tensor) -> None:
    with torch.inference_mode():
        hidden, _ = official.module.encoder(features, counts(features.shape[2]))
        official.golden.assert_close("hidden", hidden, atol=TOLERANCE)
        if "fsq_pre_tanh" in official.golden:
            projected = official.module.quantizer.get_submodule("_codebook.project_down")(hidden)
            official.golden.assert_close("fsq_pre_tanh", projected, atol=TOLERANCE)


def test_rows_of_unequal_length_do_not_disturb_each_other(official: Official) -> None:
    lengths = (203, 130, 97, 40, 5)
    batch = ragged_batch(*lengths)
    tokens, count = run(official.module, batch, counts(*lengths))
    assert count[:, 0].tolist() == [math.ceil(length / official.frames_per_token) for length in lengths]
    for row, length in enumerate(lengths):
        alone, _ = run(official.module, batch[row : row + 1, :, :length], counts(length))
        valid = int(count[row])
        with torch.inference_mode():
            hidden, _ = official.module.encoder(batch[row : row + 1, :, :length], counts(length))
            certain = official.module.quantizer.margin(hidden)[0] > ROW_MARGIN
        assert certain.float().mean() > 0.9
        assert tokens[row, :valid][certain].tolist() == alone[0][certain].tolist()
        assert not tokens[row, valid:].any()


def test_added_positions_are_sinusoids(golden: Callable[[str], Golden]) -> None:
    table = SpeechTokenizer(SIZES[1]).encoder.positional_embedding.numpy()
    np.testing.assert_allclose(table, golden(FILES[1])["w.encoder.positional_embedding"], atol=1e-4)


def test_equally_near_codewords_give_the_lowest() -> None:
    codebook = SpeechTokenizer(SIZES[1]).quantizer.get_submodule("_codebook")
    embed = codebook.get_buffer("embed")
    embed[:] = torch.nn.functional.normalize(torch.randn(embed.shape), dim=1)
    embed[70] = embed[31]
    codes = codebook(3 * embed[None, [70, 31, 5]])
    assert codes.tolist() == [[31, 31, 5]]


def test_the_nearest_codeword_is_by_distance_not_by_angle() -> None:
    codebook = SpeechTokenizer(SIZES[1]).quantizer.get_submodule("_codebook")
    codewords = (
        torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
        * torch.linspace(0.02, 0.3, 128)[:, None]
    )
    codebook.get_buffer("embed")[:] = codewords
    hidden = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(1))
    direction = (hidden / hidden.norm(dim=2, keepdim=True)).double()
    expected = torch.cdist(direction, codewords.double()[None]).argmin(dim=2)
    assert codebook(hidden).tolist() == expected.tolist()
    assert expected.tolist() != (direction @ codewords.double().T).argmax(dim=2).tolist()
