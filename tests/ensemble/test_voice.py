"""The tensors of an encoded voice are checked before a graph sees them."""

from __future__ import annotations

import numpy as np
import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.voice import Voice


def feed(tokens: int = 50, frames: int = 100) -> Feed:
    """As `voice_encoder` gives it for two seconds: padded to the grid, without batch dimension."""
    return {
        "prompt_tokens": np.zeros(75, np.int32),
        "prompt_token_count": np.array([tokens], np.int32),
        "prompt_mel": np.zeros((150, 80), np.float32),
        "prompt_frame_count": np.array([frames], np.int32),
        "speaker_embedding": np.ones(192, np.float32),
    }


def read(given: Feed, family: Family = COSYVOICE2) -> Voice:
    return Voice.from_feed(given).checked(family)


@pytest.mark.parametrize(
    ("tokens", "frames", "used"), [(50, 100, 50), (50, 99, 49), (50, 101, 50), (49, 100, 49)]
)
def test_a_token_counts_when_both_its_frames_are_there(tokens: int, frames: int, used: int) -> None:
    voice = read(feed(tokens, frames))
    assert (len(voice.tokens), len(voice.mel)) == (used, 2 * used)


def test_v1_keeps_all_tokens_and_frames() -> None:
    voice = read(feed(50, 86), COSYVOICE1)
    assert (len(voice.tokens), len(voice.mel)) == (50, 86)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("reference", [True, False])
def test_the_flow_gets_what_it_declares(family: Family, reference: bool) -> None:
    pipeline, voice = pipeline_of(family), read(feed(), family)
    made = voice.feed(family, reference)
    assert (made["prompt_token_count"][0] > 0) == (made["prompt_frame_count"][0] > 0) == reference
    for tensor in (*pipeline.prompt, pipeline.speaker_embedding.outputs[0]):
        assert made[tensor.name].dtype == tensor.numpy_type
        assert made[tensor.name].ndim == len(tensor.dims)
    assert len(made["prompt_tokens"]) % pipeline.prompt_tokens.step == 0
    assert len(made["prompt_mel"]) % pipeline.prompt_frames.step == 0


def test_a_speaker_embedding_alone_is_a_voice() -> None:
    voice = read({"speaker_embedding": np.ones(192, np.float32)})
    assert not voice.has_reference


@pytest.mark.parametrize("name", ["prompt_token_count", "prompt_frame_count"])
@pytest.mark.parametrize("count", [-1, 0, 151])
def test_a_count_outside_its_tensor_is_refused(name: str, count: int) -> None:
    with pytest.raises(InputError, match=f"{name} is {count}; its tensor has room for 1 to"):
        read(feed() | {name: np.array([count], np.int32)})


@pytest.mark.parametrize("token", [-1, 6561])
def test_ids_outside_the_codebook_are_refused(token: int) -> None:
    given = feed()
    given["prompt_tokens"][3] = token
    with pytest.raises(InputError, match="allowed are 0 to 6560"):
        read(given)


@pytest.mark.parametrize("name", ["prompt_mel", "speaker_embedding"])
def test_nan_is_refused(name: str) -> None:
    given = feed()
    given[name].flat[7] = np.nan
    with pytest.raises(InputError, match=f"{name} holds NaN"):
        read(given)


def test_a_voice_in_part_is_refused() -> None:
    with pytest.raises(InputError, match="incomplete: send all tensors"):
        read({k: v for k, v in feed().items() if k != "prompt_mel"})
    with pytest.raises(InputError, match="no voice: give voice_name"):
        read({})


def test_an_embedding_of_zeros_is_refused() -> None:
    with pytest.raises(InputError, match="all zeros"):
        read(feed() | {"speaker_embedding": np.zeros(192, np.float32)})


def test_padding_is_not_looked_at() -> None:
    given = feed()
    given["prompt_tokens"][60] = -5
    assert len(read(given).tokens) == 50
