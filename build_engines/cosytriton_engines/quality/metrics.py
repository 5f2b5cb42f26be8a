"""What is measured of a variant of each model, which direction is better and what is tolerated.

`METRICS` is the one table: the tests, the builds, the search for layers to keep and the report all read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cosytriton_engines.quality import distances
from cosytriton_engines.quality.distances import EXACT_DB, Array, Values
from cosytriton_ensemble import names
from cosytriton_ensemble.profiles import Precision

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: how it is computed and what is tolerated.

    Attributes:
        name: key of the figure in what `measure` returns and in manifests.
        output: the output of the graph that is judged.
        title: how people call it.
        unit: "%", "dB", "nats" or "" for a pure number.
        better: which direction is.
        tolerance: the last value that is accepted, by precision; without an entry the figure only informs.
        reason: why this is measured and tolerated that far.
        worst: the figure of a variant that computes NaN.
        spec: how the figure is formatted.
        values: valid entries of one row, FP32's and the variant's, to values.
        combine: the values of all rows to the figure.

    """

    name: str
    output: str
    title: str
    unit: str
    better: Better
    tolerance: Mapping[Precision, float]
    reason: str
    worst: float
    spec: str
    values: Callable[[Array, Array], Values]
    combine: Callable[[Values], float] = distances.mean

    def accepts(self, precision: Precision, value: float) -> bool:
        """Whether the figure is within the tolerance; NaN never is."""
        if precision not in self.tolerance:
            return True
        limit = self.tolerance[precision]
        return value >= limit if self.better == "higher" else value <= limit

    def text(self, value: float) -> str:
        """The figure with its unit."""
        if self.unit == "dB" and self.better == "higher" and value >= EXACT_DB:
            return "exact"
        return f"{value:{self.spec}}{self.unit if self.unit == '%' else f' {self.unit}'.rstrip()}"


def _snr(name: str, output: str, title: str, tolerance: Mapping[Precision, float], reason: str) -> Metric:
    return Metric(
        name,
        output,
        title,
        "dB",
        "higher",
        tolerance,
        reason,
        worst=-EXACT_DB,
        spec=".1f",
        values=distances.powers,
        combine=distances.decibels,
    )


def _cosine(name: str, title: str, tolerance: Mapping[Precision, float], reason: str) -> Metric:
    combine = distances.smallest if name.endswith("worst") else distances.mean
    return Metric(
        name,
        names.SPEAKER_EMBEDDING,
        title,
        "",
        "higher",
        tolerance,
        reason,
        worst=-1.0,
        spec=".5f",
        values=distances.cosine,
        combine=combine,
    )


def _agreement(
    name: str,
    output: str,
    title: str,
    tolerance: Mapping[Precision, float],
    reason: str,
    values: Callable[[Array, Array], Values],
) -> Metric:
    return Metric(
        name, output, title, "%", "higher", tolerance, reason, 0.0, ".2f", values, distances.percent
    )


NOT_FINITE = Metric(
    "not_finite",
    "",  # all of them
    "NaN or infinite",
    "%",
    "lower",
    {"fp16": 0.0, "int8": 0.0},
    "One NaN becomes silence or a bang, and spreads through caches: none is allowed.",
    worst=100.0,
    spec=".3g",
    values=lambda reference, variant: (np.isfinite(reference) & ~np.isfinite(variant)).reshape(-1) * 1.0,
    combine=distances.percent,
)
"""Measured for every model, on all its outputs."""

_SNR: Mapping[Precision, float] = {"fp16": 40.0, "int8": 20.0}
_MEL_REASON = (
    "An error of 1 % of the log-mel in half precision, of 10 % in INT8; the distance says what is heard."
)

_MEL = (
    _snr("mel_snr", names.MEL, "mel SNR", _SNR, _MEL_REASON),
    Metric(
        "mel_distance",
        names.MEL,
        "mel distance",
        "dB",
        "lower",
        {"fp16": 0.1, "int8": 1.0},
        "A change of level of 1 dB is about the smallest that is heard.",
        worst=EXACT_DB,
        spec=".3f",
        values=distances.mel_distance,
    ),
)

METRICS: Mapping[str, tuple[Metric, ...]] = {
    "speaker_embedding": (
        _cosine(
            "cosine_mean",
            "cosine, mean",
            {"fp16": 0.9999, "int8": 0.99},
            "Two recordings of one person reach about 0.7: at 0.99 the voice is the same.",
        ),
        _cosine(
            "cosine_worst",
            "cosine, worst",
            {"fp16": 0.9995, "int8": 0.98},
            "No single voice may be lost in a good mean.",
        ),
    ),
    "audio_tokenizer": (
        _agreement(
            "token_agreement",
            names.PROMPT_TOKENS,
            "equal tokens",
            {"fp16": 99.0, "int8": 90.0},
            "A token is a rounded vector: small errors flip those near an edge to a neighbour in sound.",
            distances.equal_ids,
        ),
    ),
    "prompt_mel": (_snr("mel_snr", names.PROMPT_MEL, "mel SNR", _SNR, _MEL_REASON),),
    "text_encoder": (
        _snr(
            "text_snr",
            "text_embeddings",
            "SNR of the text",
            _SNR,
            "What the language model hears of the text: its own layers add about as much noise again.",
        ),
        _snr(
            "speaker_snr",
            "speaker",
            "SNR of the speaker",
            _SNR,
            "One position among hundreds, so it may not be worse than the text.",
        ),
    ),
    "speech_lm": (
        _agreement(
            "next_token_agreement",
            "logits",
            "equal next token",
            {"fp16": 99.0, "int8": 95.0},
            "The most probable token; it is sampled, so a close second is no fault.",
            distances.equal_choice,
        ),
        Metric(
            "divergence",
            "logits",
            "KL divergence",
            "nats",
            "lower",
            {"fp16": 1e-3, "int8": 0.02},
            "What sampling feels: 0.02 nats move a tenth of the probability at most (Pinsker).",
            worst=100.0,
            spec=".2g",
            values=distances.divergence,
        ),
        _snr(
            "logits_snr",
            "logits",
            "logits SNR",
            {},
            "Informs: a shift of all logits changes it, but no choice.",
        ),
    ),
    "flow": _MEL,
    "tts_stream": _MEL,  # the flow with the state of a stream
    "vocoder": (
        Metric(
            "log_spectral_distance",
            names.WAVEFORM,
            "log spectral distance",
            "dB",
            "lower",
            {"fp16": 0.5, "int8": 1.5},
            "Coded speech below 1 dB is called transparent. It is deaf to the phase, as an ear nearly is.",
            worst=EXACT_DB,
            spec=".3f",
            values=distances.log_spectral_distance,
        ),
        _snr(
            "waveform_snr",
            names.WAVEFORM,
            "waveform SNR",
            {},
            "Informs: the phase sums tiny errors of the pitch, so it falls with time where nothing is heard.",
        ),
    ),
}


def limits(models: Iterable[str], precision: Precision) -> tuple[dict[str, float], dict[str, str]]:
    """What a manifest says of variants: metric name -> tolerance, and metric name -> better direction."""
    judged = [m for model in models for m in (NOT_FINITE, *METRICS[model]) if precision in m.tolerance]
    return {m.name: m.tolerance[precision] for m in judged}, {m.name: m.better for m in judged}
