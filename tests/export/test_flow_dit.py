"""The diffusion transformer's parts against plain formulas; the whole stands in test_flow.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosytriton_export.flow.dit import AdaptiveNorm, DiT, RotaryAttention, RotaryEmbedding, rotate
from cosytriton_export.flow.history import Beginning

FRAMES, WIDTH, HEADS = 12, 24, 3
HEAD_WIDTH = WIDTH // HEADS


@pytest.fixture
def attention() -> RotaryAttention:
    """Attention whose output is that of its heads, side by side."""
    torch.manual_seed(0)
    attention = RotaryAttention(WIDTH, HEADS, HEAD_WIDTH).requires_grad_(False)
    attention.to_out = nn.ModuleList([nn.Identity()])
    attention.to_q.weight.mul_(5)  # scores that differ much between the keys
    return attention


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, FRAMES, WIDTH, generator=torch.Generator().manual_seed(1))


def attend(attention: RotaryAttention, x: Tensor) -> Tensor:
    rotary = RotaryEmbedding(HEAD_WIDTH)(x.shape[1])
    heads: Tensor = attention(x, rotary, Beginning(torch.zeros(1, 1, x.shape[1], x.shape[1])))
    return heads.reshape(2, -1, HEADS, HEAD_WIDTH)


def test_first_head_alone_knows_the_order(attention: RotaryAttention, x: Tensor) -> None:
    """Attention without positions gives reversed frames the reversed result."""
    heads = attend(attention, x)
    reversed_heads = attend(attention, x.flip(1)).flip(1)
    torch.testing.assert_close(reversed_heads[:, :, 1:], heads[:, :, 1:])
    assert (reversed_heads[:, :, 0] - heads[:, :, 0]).abs().max() > 0.1


def test_first_head_turns_pairs_as_complex_numbers(attention: RotaryAttention, x: Tensor) -> None:
    frequency = 10_000 ** (-torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float64) / HEAD_WIDTH)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(FRAMES)[:, None] * frequency)

    def turned(projected: Tensor) -> Tensor:
        first_head = projected[..., :HEAD_WIDTH].double().reshape(2, FRAMES, -1, 2)
        return torch.view_as_complex(first_head) * turn

    query, key = turned(attention.to_q(x)), turned(attention.to_k(x))
    scores = (query @ key.mH).real / HEAD_WIDTH**0.5
    expected = scores.softmax(-1) @ attention.to_v(x)[..., :HEAD_WIDTH].double()
    got = attend(attention, x)[:, :, 0]
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=0)


def test_rotation_keeps_lengths_and_the_other_channels(x: Tensor) -> None:
    rotated = rotate(x, *RotaryEmbedding(HEAD_WIDTH)(FRAMES))
    torch.testing.assert_close(rotated[..., HEAD_WIDTH:], x[..., HEAD_WIDTH:], atol=0, rtol=0)
    torch.testing.assert_close(rotated.norm(dim=2), x.norm(dim=2))


def test_adaptive_norm_is_a_layer_norm_with_the_given_scale_and_shift(x: Tensor) -> None:
    shift, scale = torch.randn(2, 1, WIDTH)
    expected = torch.nn.functional.layer_norm(x, (WIDTH,), 1 + scale[0], shift[0], eps=1e-6)
    torch.testing.assert_close(AdaptiveNorm(WIDTH, 2)(x, shift, scale), expected)


def test_velocity_of_a_frame_depends_on_the_future_by_attention_alone() -> None:
    """With a bias that hides later keys, what comes later changes nothing before it."""
    torch.manual_seed(0)
    mel_bins, width = 4, 32
    dit = DiT(mel_bins, mel_bins, width, depth=2, heads=2, head_width=16, ff_mult=2).requires_grad_(False)
    x = torch.randn(1, 4 * mel_bins, FRAMES)
    changed = torch.cat((x[..., :7], torch.randn(1, 4 * mel_bins, FRAMES - 7)), dim=2)
    time = dit.embed_time(torch.tensor([0.3]))
    causal = torch.full((FRAMES, FRAMES), -1e4).triu(1)[None, None]
    for bias, is_same in ((causal, True), (torch.zeros_like(causal), False)):
        difference = (dit(changed, time, bias) - dit(x, time, bias))[..., :7].abs().max()
        assert (difference < 1e-6) == is_same
