"""A stage is said once: what derives from a declaration, and what a wrong wiring is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.pipeline import PIPELINES, pipeline_of
from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Step, Tensor

SPEAKER_EMBEDDING = pipeline_of(COSYVOICE2).speaker_embedding
VOICE_ENCODER = pipeline_of(COSYVOICE2).voice_encoder
NATIVE_STAGES = {f"{name}, {s.name}": s for name, p in PIPELINES.items() for s in p.native_stages}

LENGTH = Dim("length", 2, 10, 40, step=8)
DOUBLE = LENGTH.times(2, "double")
ECHO = Stage(
    "echo",
    (Tensor("x", "FP32", (DOUBLE, 3)), Tensor("count", "INT32", (1,), counts=LENGTH)),
    (Tensor("y", "FP32", (DOUBLE, 3)),),
    max_batch=4,
)


def test_axes_name_every_dynamic_dimension() -> None:
    assert ECHO.axes() == {
        "x": {0: "batch", 1: "double"},
        "count": {0: "batch"},
        "y": {0: "batch", 1: "double"},
    }


def test_profile_ranges_are_the_dimensions_and_the_batch() -> None:
    assert ECHO.profile()["x"] == {"min": (1, 4, 3), "opt": (2, 20, 3), "max": (4, 80, 3)}


def test_padding_goes_up_to_the_grid() -> None:
    assert [LENGTH.padded(n) for n in (0, 1, 8, 9)] == [8, 8, 8, 16]


def test_sample_is_seeded_ragged_and_within_its_counts() -> None:
    feed = ECHO.sample("opt", batch=4, seed=7)
    again = ECHO.sample("opt", batch=4, seed=7)
    assert all(np.array_equal(feed[name], again[name]) for name in feed)
    assert feed["x"].shape == (4, 20, 3)
    counts = feed["count"][:, 0]
    assert counts[0] == LENGTH.opt
    assert counts.min() >= LENGTH.min
    assert counts.max() <= LENGTH.opt


@pytest.mark.parametrize("stage", NATIVE_STAGES.values(), ids=list(NATIVE_STAGES))
def test_every_native_stage_has_a_sample_that_fits_its_profile(stage: Stage) -> None:
    profile = stage.profile()
    for size in ("min", "opt", "max"):
        for name, array in stage.sample(size).items():
            low, high = profile[name]["min"], profile[name]["max"]
            assert all(a <= b <= c for a, b, c in zip(low, array.shape, high, strict=True))


def _rewired(ensemble: Ensemble, index: int, inputs: Mapping[str, Any]) -> Ensemble:
    steps = list(ensemble.steps)
    steps[index] = replace(steps[index], inputs={**steps[index].inputs, **inputs})
    return replace(ensemble, steps=tuple(steps))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"waveform_16k": "nothing"}, "'waveform_16k' is fed by no earlier step"),
        ({"waveform_16k": "prompt_tokens"}, "'waveform_16k' is fed by no earlier step"),  # its own output
        ({"waveform_16k": "sample_count_16k"}, "'waveform_16k' wants FP32 .samples_16k."),
        ({"waveform_16k": "speaker_embedding"}, "but 'speaker_embedding' is FP32 .192."),
        ({"sample_count_16k": "waveform_16k"}, "but 'waveform_16k' is FP32"),
        ({"tempo": "waveform_16k"}, "unknown inputs .'tempo'."),
    ],
)
def test_wrong_wiring_is_refused_with_its_place(inputs: Mapping[str, Any], message: str) -> None:
    step = [step.stage.name for step in VOICE_ENCODER.steps].index("audio_tokenizer")
    with pytest.raises(RepositoryError, match=f"ensemble 'voice_encoder': step 'audio_tokenizer'.*{message}"):
        _rewired(VOICE_ENCODER, step, inputs)


def test_a_step_must_not_lack_an_input() -> None:
    with pytest.raises(RepositoryError, match="lacks .'sample_count_16k'."):
        Ensemble(
            "e",
            SPEAKER_EMBEDDING.inputs,
            (),
            (Step(SPEAKER_EMBEDDING, {"waveform_16k": "waveform_16k"}, {}),),
        )


def test_a_step_may_leave_an_optional_input_out() -> None:
    seed = Tensor("seed", "INT64", (1,), optional=True)
    stage = replace(ECHO, inputs=(*ECHO.inputs, seed))
    wired = {tensor.name: tensor.name for tensor in ECHO.inputs}
    Ensemble("e", ECHO.inputs, ECHO.outputs, (Step(stage, wired, {"y": "y"}),))


def test_a_tensor_that_nobody_uses_is_refused_as_triton_would() -> None:
    with pytest.raises(RepositoryError, match="nobody uses .'checkpoint'."):
        replace(VOICE_ENCODER, outputs=tuple(t for t in VOICE_ENCODER.outputs if t.name != "checkpoint"))


def test_every_ensemble_output_is_made_by_a_step() -> None:
    for pipeline in PIPELINES.values():
        for ensemble in pipeline.ensembles:
            made = {name for step in ensemble.steps for name in step.outputs.values()}
            assert {t.name for t in ensemble.outputs} <= made
