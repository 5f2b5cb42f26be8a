"""Relative attention over a cache against the formula with a table of distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cosytriton_export.flow.encoder import RelativeAttention, relative_positions
from cosytriton_export.kv_cache import causal_bias
from cosytriton_export.relative_transformer import POSITIONS, CachedRelativeAttention, Places

WIDTH, HEADS, CAPACITY = 32, 4, 40


@pytest.fixture(params=["computed", "tabulated"])
def attention(request: pytest.FixtureRequest) -> CachedRelativeAttention:
    torch.manual_seed(0)
    attention = CachedRelativeAttention(WIDTH, HEADS).requires_grad_(False)
    for bias in (attention.pos_bias_u, attention.pos_bias_v):
        bias.normal_()
    if request.param == "tabulated":
        attention.tabulate()
    return attention


def shifted(attention: CachedRelativeAttention, x: Tensor) -> Tensor:
    """The same attention of a whole sequence by the table of distances and its shift, in double precision."""
    extent = x.shape[1]
    positions = relative_positions(extent, WIDTH, x.device).double()
    by_table = RelativeAttention(WIDTH, HEADS)
    by_table.load_state_dict(attention.state_dict())
    bias = causal_bias(torch.arange(extent)[None], extent)
    out: Tensor = by_table.double()(x.double(), positions, bias)
    return out.float()


def empty(batch: int, capacity: int = CAPACITY) -> tuple[Tensor, Tensor]:
    keys, values = (torch.zeros(batch, HEADS, capacity, WIDTH // HEADS) for _ in range(2))
    return keys, values


def test_a_whole_sequence_equals_the_shifted_table(attention: CachedRelativeAttention) -> None:
    x = torch.randn(2, 30, WIDTH)
    out, _, _ = attention.extend(
        x, Places.of(HEADS, torch.zeros(2, dtype=torch.int32), 30, CAPACITY), *empty(2)
    )
    torch.testing.assert_close(out, shifted(attention, x), rtol=0, atol=1e-5)


def test_rows_that_arrive_in_unequal_pieces_equal_the_shifted_table(
    attention: CachedRelativeAttention,
) -> None:
    x, (keys, values) = torch.randn(3, 30, WIDTH), empty(3)
    wanted = shifted(attention, x)
    ends = [(20, 9, 1), (21, 14, 2), (29, 15, 10), (30, 23, 18)]  # of each row, after each piece
    past = (0, 0, 0)
    for end in ends:
        new = max(np.subtract(end, past))
        piece = torch.stack([torch.cat([row, row])[p : p + new] for row, p in zip(x, past, strict=True)])
        places = Places.of(HEADS, torch.tensor(past), new, CAPACITY)
        out, keys, values = attention.extend(piece, places, keys, values)
        for row, (p, e) in enumerate(zip(past, end, strict=True)):
            torch.testing.assert_close(out[row, : e - p], wanted[row, p:e], rtol=0, atol=1e-5)
        past = end


def test_distances_stay_exact_far_from_the_start(attention: CachedRelativeAttention) -> None:
    """The longest sequences: 40 s of speech behind 40 s of prompt."""
    x, past = torch.randn(1, 4000, WIDTH), 3990
    start, end = (
        Places.of(HEADS, torch.zeros(1, dtype=torch.int32), past, 4000),
        Places.of(HEADS, torch.tensor([past]), 10, 4000),
    )
    _, keys, values = attention.extend(x[:, :past], start, *empty(1, 4000))
    out, _, _ = attention.extend(x[:, past:], end, keys, values)
    torch.testing.assert_close(out, shifted(attention, x)[:, past:], rtol=0, atol=1e-5)


def test_positions_beyond_the_table_are_refused(attention: CachedRelativeAttention) -> None:
    attention.tabulate()
    past = torch.tensor([POSITIONS])
    with pytest.raises(RuntimeError, match="out of bounds"):
        attention.extend(
            torch.zeros(1, 1, WIDTH), Places.of(HEADS, past, 1, POSITIONS + 1), *empty(1, POSITIONS + 1)
        )
