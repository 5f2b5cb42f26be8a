"""The sizes that a family declares follow from its rates, and leave room for what may be asked."""

from __future__ import annotations

import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family, family_named
from cosytriton_ensemble.pipeline import MAX_POSITIONS, TEXT, pipeline_of

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
REFERENCE_SECONDS, SPEECH_SECONDS = 30, 60


def test_a_family_is_found_by_its_name() -> None:
    assert [family_named(name) for name in ("cosyvoice1", "cosyvoice2", "cosyvoice3")] == [
        COSYVOICE1,
        COSYVOICE2,
        COSYVOICE3,
    ]
    with pytest.raises(InputError, match="no model family 'cosyvoice4'; known are cosyvoice1, cosyvoice2"):
        family_named("cosyvoice4")


@pytest.mark.parametrize("family", [COSYVOICE2, COSYVOICE3], ids=["cosyvoice2", "cosyvoice3"])
def test_frames_and_samples_of_a_token_are_whole_numbers(family: Family) -> None:
    """25 tokens/s, 50 mel frames/s, 24 kHz: one dimension is a multiple of the other."""
    pipeline = pipeline_of(family)
    assert (pipeline.frames.base, pipeline.frames.factor) == (pipeline.tokens, 2)
    assert (pipeline.prompt_frames.base, pipeline.prompt_frames.factor) == (pipeline.prompt_tokens, 2)
    assert (family.frames(25), family.samples(25)) == (50, 24_000)


def test_frames_of_a_token_are_no_whole_number_in_v1() -> None:
    """50 tokens/s, 22,050 / 256 = 86.13 mel frames/s: the frames have a dimension of their own."""
    pipeline = pipeline_of(COSYVOICE1)
    assert pipeline.frames.base is None
    assert pipeline.prompt_frames.base is None
    assert [COSYVOICE1.frames(n) for n in (0, 1, 2, 50, 100)] == [0, 1, 3, 86, 172]
    assert COSYVOICE1.samples(100) == 172 * 256


@EVERY_FAMILY
def test_the_longest_speech_is_a_minute(family: Family) -> None:
    pipeline = pipeline_of(family)
    assert pipeline.tokens.max == SPEECH_SECONDS * family.token_rate
    assert pipeline.frames.max == family.frames(pipeline.tokens.max)
    assert pipeline.samples.max == family.samples(pipeline.tokens.max)
    assert SPEECH_SECONDS - pipeline.samples.max / family.sample_rate < family.mel_hop / family.sample_rate


@EVERY_FAMILY
def test_the_longest_reference_fits(family: Family) -> None:
    """On the padding grid too, since that is what the stages are given."""
    pipeline = pipeline_of(family)
    samples = REFERENCE_SECONDS * family.sample_rate
    assert pipeline.samples_model.max == pipeline.samples_model.padded(samples) == samples
    for dim, size in (
        (pipeline.prompt_tokens, REFERENCE_SECONDS * family.token_rate),
        (pipeline.prompt_frames, samples // family.mel_hop),
    ):
        assert size <= dim.padded(size) <= dim.max


@EVERY_FAMILY
def test_a_streamed_chunk_fits_and_is_padded_little(family: Family) -> None:
    dim = pipeline_of(family).tokens
    for tokens in (family.hop_tokens + family.lookahead, family.max_hop_tokens + family.lookahead):
        assert dim.min <= tokens <= dim.padded(tokens) <= dim.max
        assert dim.padded(tokens) - tokens < family.hop_tokens


@EVERY_FAMILY
def test_the_language_model_has_room_for_the_longest_prompt_and_speech(family: Family) -> None:
    """In v1 not for both at once: its table of distances ends."""
    pipeline = pipeline_of(family)
    prompt = TEXT.max + REFERENCE_SECONDS * family.token_rate + 3
    assert pipeline.longest_prompt == prompt
    assert pipeline.longest_sequence % 64 == 0
    wanted = prompt + SPEECH_SECONDS * family.token_rate
    assert min(wanted, MAX_POSITIONS) <= pipeline.longest_sequence <= MAX_POSITIONS
    assert (pipeline.longest_sequence < wanted) == (family is COSYVOICE1)


def test_what_a_chunk_carries_is_declared_where_the_family_has_it() -> None:
    carried = {family.name: inputs_of(family) for family in FAMILIES.values()}
    assert "mu_cache" in carried["cosyvoice1"]
    assert "streaming" not in carried["cosyvoice1"]
    assert [family for family in FAMILIES if "source_cache" in carried[family]] == [
        "cosyvoice1",
        "cosyvoice2",
    ]
    assert all("phase" in inputs for inputs in carried.values())
    assert {"streaming", "finalize"} <= carried["cosyvoice2"] & carried["cosyvoice3"]


def inputs_of(family: Family) -> set[str]:
    pipeline = pipeline_of(family)
    return {tensor.name for stage in (pipeline.flow, pipeline.vocoder) for tensor in stage.inputs}
