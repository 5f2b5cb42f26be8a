"""Interpolation row by row against torch's, and norms that see a row's own frames alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.flow.group_norm import MaskedGroupNorm
from cosytriton_export.flow.length_regulator import InterpolateRegulator, frame_counts, interpolate_rows

# Torch rounds the position among the tokens once, a graph after each operation: one unit in the last place
# between them, times the difference of two neighbours.
ROUNDING = 2**-16  # of a position below 256
WIDTH = 3


def stretch(x: Tensor, frames: int) -> Tensor:
    """Torch's interpolation of x [S, M] to [frames, M]."""
    return F.interpolate(x.T[None], size=frames, mode="linear", align_corners=False)[0].T


def regulate(prompt: Tensor, prompt_frames: int, speech: Tensor) -> list[Tensor]:
    """The pieces of one row as the official class makes them."""
    frames = COSYVOICE1.frames(len(speech))
    pieces = [stretch(prompt, prompt_frames)] if prompt_frames else []
    if len(speech) <= 40:
        return [*pieces, stretch(speech, frames)]
    middle = stretch(speech[20:-20], frames - 68)
    return [*pieces, stretch(speech[:20], 34), middle, stretch(speech[-20:], 34)]


def test_every_length_is_stretched_as_torch_does() -> None:
    """All counts up to 256 tokens in one batch, whose padding and neighbours must not matter."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.arange(1, 257).reshape(-1, 1)
    prompt_tokens = torch.randint(0, 90, counts.shape, generator=generator)
    prompt_frames = frame_counts(prompt_tokens) + (prompt_tokens > 0) * (counts % 3)  # any ratio
    x = torch.randn((len(counts), 500, WIDTH), generator=generator)
    extent = COSYVOICE1.frames(500)
    stretched = interpolate_rows(x, prompt_tokens, prompt_frames, counts, extent)
    assert stretched.shape == (len(counts), extent, WIDTH)
    for row, (count,) in enumerate(counts.tolist()):
        start = int(prompt_tokens[row])
        pieces = regulate(x[row, :start], int(prompt_frames[row]), x[row, start : start + count])
        expected = torch.cat(pieces)
        steepest = float(x[row].diff(dim=0).abs().max())
        found = stretched[row, : len(expected)]
        torch.testing.assert_close(found, expected, atol=ROUNDING * steepest, rtol=0)


def test_edges_of_a_long_row_do_not_depend_on_its_length() -> None:
    tokens, none = torch.randn((1, 200, WIDTH)), torch.zeros((1, 1), dtype=torch.int64)
    first = interpolate_rows(tokens, none, none, torch.tensor([[120]]), 206)
    second = interpolate_rows(tokens[:, 100:], none, none, torch.tensor([[77]]), 132)
    torch.testing.assert_close(first[:, -34:], second[:, :34])


@pytest.mark.parametrize("groups", [1, 4])
def test_group_norm_of_a_padded_row(groups: int) -> None:
    norm, official = MaskedGroupNorm(groups, 8), nn.GroupNorm(groups, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    official.load_state_dict(norm.state_dict())
    x, counts = torch.randn((3, 8, 9)) * 5 + 2, [9, 4, 1]
    mask = (torch.arange(9) < torch.tensor(counts)[:, None])[:, None].float()
    normal = norm(x, mask)
    for row, count in enumerate(counts):
        alone = official(x[row : row + 1, :, :count])
        torch.testing.assert_close(normal[row : row + 1, :, :count], alone, atol=1e-5, rtol=0)


def test_regulator_ignores_what_is_beyond_a_row() -> None:
    torch.manual_seed(0)
    regulator = InterpolateRegulator(8, layers=4).requires_grad_(False)
    x, count, none = torch.randn((1, 30, 8)), torch.tensor([[13]]), torch.zeros((1, 1), dtype=torch.int64)
    frames = COSYVOICE1.frames(13)
    alone = regulator(x[:, :13], none, none, count, torch.ones((1, 1, frames)))
    mask = (torch.arange(51) < frames)[None, None].float()
    padded = regulator(x, none, none, count, mask)
    torch.testing.assert_close(padded[..., :frames], alone, atol=1e-6, rtol=0)
