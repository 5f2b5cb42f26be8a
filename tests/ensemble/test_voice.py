"""The tensors of an encoded voice are checked before a graph sees them."""

from __future__ import annotations

import numpy as np
import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.voice import used_prompt_count


def voice(tokens: int = 50, frames: int = 100) -> Feed:
    """As `voice_encoder` gives it for two seconds: padded to the grid, without batch dimension."""
    return {
        "prompt_tokens": np.zeros(75, np.int32),
        "prompt_token_count": np.array([tokens], np.int32),
        "prompt_mel": np.zeros((150, 80), np.float32),
        "prompt_frame_count": np.array([frames], np.int32),
        "speaker_embedding": np.zeros(192, np.float32),
    }


@pytest.mark.parametrize(
    ("tokens", "frames", "used"), [(50, 100, 50), (50, 99, 49), (50, 101, 50), (49, 100, 49)]
)
def test_a_token_counts_when_both_its_frames_are_there(tokens: int, frames: int, used: int) -> None:
    assert used_prompt_count(voice(tokens, frames)) == used


@pytest.mark.parametrize("name", ["prompt_token_count", "prompt_frame_count"])
@pytest.mark.parametrize("count", [-1, 0, 151])
def test_a_count_outside_its_tensor_is_refused(name: str, count: int) -> None:
    feed = voice() | {name: np.array([count], np.int32)}
    with pytest.raises(InputError, match=f"{name} is {count}; its tensor has room for 1 to"):
        used_prompt_count(feed)


@pytest.mark.parametrize("token", [-1, 6561])
def test_ids_outside_the_codebook_are_refused(token: int) -> None:
    feed = voice()
    feed["prompt_tokens"][3] = token
    with pytest.raises(InputError, match="allowed are 0 to 6560"):
        used_prompt_count(feed)


@pytest.mark.parametrize("name", ["prompt_mel", "speaker_embedding"])
def test_nan_is_refused(name: str) -> None:
    feed = voice()
    feed[name].flat[7] = np.nan
    with pytest.raises(InputError, match=f"{name} holds NaN"):
        used_prompt_count(feed)


def test_padding_is_not_looked_at() -> None:
    feed = voice()
    feed["prompt_tokens"][60] = -5
    assert used_prompt_count(feed) == 50
