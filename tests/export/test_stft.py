"""The convolutional transforms against torch.stft and torch.istft."""

from __future__ import annotations

import pytest
import torch

from cosytriton_export.stft import InverseStft, Stft, hann_window, length_mask, reflect_pad

FORWARD_TOLERANCE = 1e-5  # relative to the largest bin
INVERSE_TOLERANCE = 2e-6
LENGTHS = (64, 40, 24)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Three signals of unequal length; what stands behind their ends must not matter."""
    signal = torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(0))
    return signal, torch.tensor(LENGTHS, dtype=torch.int32)[:, None]


@pytest.mark.parametrize(("n_fft", "hop"), [(16, 4), (20, 5), (15, 5)])
def test_each_row_is_transformed_as_if_it_were_alone(n_fft: int, hop: int) -> None:
    window = hann_window(n_fft)
    signal, counts = rows()
    spectrum = Stft(window, hop)(signal, counts)
    for row, length, given in zip(signal, LENGTHS, spectrum, strict=True):
        alone = torch.stft(row[:length], n_fft, hop, window=window.float(), return_complex=True)
        wanted = torch.cat([alone.real, alone.imag])
        error = (given[:, : wanted.shape[1]] - wanted).abs().max()
        assert error < FORWARD_TOLERANCE * wanted.abs().max()


def test_inverse_gives_each_row_back_up_to_its_own_end() -> None:
    hop = 4
    window = hann_window(16)
    signal, counts = rows()
    spectrum = Stft(window, hop)(signal, counts)
    mask = length_mask(counts // hop + 1, spectrum.shape[2])
    given = InverseStft(window, hop)(spectrum * mask, mask)
    assert given.shape == signal.shape
    for row, length, back in zip(signal, LENGTHS, given, strict=True):
        assert (back[:length] - row[:length]).abs().max() < INVERSE_TOLERANCE


def test_reflection_is_at_the_end_of_the_row() -> None:
    signal = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 0]])
    padded = reflect_pad(signal, torch.tensor([[6], [4]]), 2, 2)
    assert padded[0].tolist() == [3, 2, 1, 2, 3, 4, 5, 6, 5, 4]
    assert padded[1, :8].tolist() == [3, 2, 1, 2, 3, 4, 3, 2]
