"""Which sizes an engine is built for."""

from __future__ import annotations

import pytest

from cosytriton_engines.engine.shapes import split
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of

STREAMED = {"flow", "vocoder"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_the_first_profile_admits_all_that_is_served(family: Family) -> None:
    """Triton takes it where its configuration names none."""
    pipeline = pipeline_of(family)
    for stage in pipeline.native_stages:
        profiles = split(stage, pipeline)
        assert profiles[0] == stage.profile()
        assert len(profiles) == (2 if stage.name in STREAMED else 1)


@pytest.mark.parametrize(
    ("family", "tokens", "frames"),
    # 28 tokens on a grid of 25 are 50, 2 frames each; 120 on a grid of 20, 206 frames on a grid of 34.
    [(COSYVOICE1, 120, 238), (COSYVOICE2, 50, 100), (COSYVOICE3, 50, 100)],
)
def test_the_second_profile_is_tuned_for_the_first_chunk_of_a_stream(
    family: Family, tokens: int, frames: int
) -> None:
    pipeline = pipeline_of(family)
    _, flow = split(pipeline.flow, pipeline)
    _, vocoder = split(pipeline.vocoder, pipeline)
    five_seconds = 5 * family.token_rate
    assert flow["tokens"]["opt"] == (4, tokens)
    assert flow["tokens"]["max"] == (8, five_seconds)
    assert vocoder["mel"]["opt"] == (4, frames, 80)
    assert vocoder["mel"]["max"] == (8, pipeline.frames.opt, 80)
    # The voice is no chunk: its reference has any length.
    for name in ("prompt_tokens", "prompt_mel"):
        assert flow[name] == pipeline.flow.profile()[name]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_every_profile_is_in_order_and_within_the_first(family: Family) -> None:
    pipeline = pipeline_of(family)
    for stage in pipeline.native_stages:
        whole, *others = split(stage, pipeline)
        for shapes in others:
            for name, sizes in shapes.items():
                rows = (whole[name]["min"], sizes["min"], sizes["opt"], sizes["max"], whole[name]["max"])
                for axis in zip(*rows, strict=True):
                    assert list(axis) == sorted(axis)
