"""How far a variant is from FP32: figures that can be worked out by hand, and graphs with spoilt weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cosytriton_engines.quality import distances
from cosytriton_engines.quality.evaluate import (
    EvaluationError,
    failures,
    floor,
    measure,
    measure_outputs,
    passes,
    speed_ratio,
)
from cosytriton_engines.quality.metrics import METRICS
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Array, Dim, Feed, Stage, Tensor

RNG = np.random.default_rng(0)
SPEECH = RNG.normal(0, 0.1, (1, 24_000)).astype(np.float32)


# ---- figures by hand ----------------------------------------------------------------------------------


def waveform(samples: Array) -> Feed:
    count = np.full((len(samples), 1), samples.shape[1], np.int32)
    return {"waveform": samples, "sample_count": count}


def mel(frames: Array, valid: int | None = None) -> Feed:
    count = np.full((len(frames), 1), frames.shape[1] if valid is None else valid, np.int32)
    return {"mel": frames, "frame_count": count}


def test_noise_at_a_tenth_of_the_amplitude_is_20_db_below() -> None:
    figures = measure_outputs("vocoder", [(waveform(SPEECH), waveform(SPEECH * np.float32(1.1)))])
    assert figures["waveform_snr"] == pytest.approx(20, abs=1e-3)


def test_a_louder_waveform_is_as_far_as_it_is_louder() -> None:
    """Twice the amplitude is 6.02 dB more in every bin."""
    figures = measure_outputs("vocoder", [(waveform(SPEECH), waveform(SPEECH * 2))])
    assert figures["log_spectral_distance"] == pytest.approx(20 * np.log10(2), abs=0.01)


def test_spectral_distance_is_deaf_to_the_phase() -> None:
    """A tone a quarter period later has no SNR left and the same spectrum."""
    time = np.arange(24_000) / 24_000
    tone, later = (np.sin(2 * np.pi * 3000 * time + p)[None].astype(np.float32) for p in (0, np.pi / 2))
    figures = measure_outputs("vocoder", [(waveform(tone), waveform(later))])
    assert figures["waveform_snr"] < 0
    assert figures["log_spectral_distance"] < 0.05


def test_what_lies_80_db_below_the_peak_is_not_counted() -> None:
    time = np.arange(24_000) / 24_000
    tone = np.sin(2 * np.pi * 440 * time)[None].astype(np.float32)
    hiss = RNG.normal(0, 1e-7, tone.shape).astype(np.float32)
    figures = measure_outputs("vocoder", [(waveform(tone), waveform(tone + hiss))])
    assert figures["log_spectral_distance"] < 1e-3


def test_silence_that_stays_silent_is_exact() -> None:
    silence = np.zeros((1, 300), np.float32)  # shorter than a window
    figures = measure_outputs("vocoder", [(waveform(silence), waveform(silence))])
    assert figures == {"not_finite": 0, "log_spectral_distance": 0, "waveform_snr": distances.EXACT_DB}


def test_mel_distance_is_in_decibels() -> None:
    """A log-mel that is ln 2 higher everywhere is 6.02 dB louder."""
    frames = RNG.normal(-5, 2, (2, 30, 80)).astype(np.float32)
    figures = measure_outputs("flow", [(mel(frames), mel(frames + np.float32(np.log(2))))])
    assert figures["mel_distance"] == pytest.approx(20 * np.log10(2), abs=1e-3)


def test_padding_is_not_compared() -> None:
    frames = RNG.normal(-5, 2, (2, 30, 80)).astype(np.float32)
    spoilt = frames.copy()
    spoilt[:, 20:] += 100
    assert measure_outputs("flow", [(mel(frames, 20), mel(spoilt, 20))])["mel_distance"] == 0
    assert measure_outputs("flow", [(mel(frames, 21), mel(spoilt, 21))])["mel_distance"] > 0


def test_agreement_counts_valid_tokens() -> None:
    """Of 8 valid tokens 2 are swapped; those behind the count differ too."""
    ours = np.arange(20, dtype=np.int32).reshape(2, 10)
    theirs = ours.copy()
    theirs[0, [0, 1]] = theirs[0, [1, 0]]
    theirs[:, 4:] = -1
    count = np.full((2, 1), 4, np.int32)
    pair = [{"prompt_tokens": ids, "prompt_token_count": count} for ids in (ours, theirs)]
    assert measure_outputs("audio_tokenizer", [(pair[0], pair[1])])["token_agreement"] == 75


def test_cosine_has_a_mean_and_a_worst() -> None:
    """One voice is kept, the other turned by 60 degrees."""
    ours = np.zeros((2, 192), np.float32)
    ours[:, 0] = 3
    theirs = ours.copy()
    theirs[1, :2] = np.cos(np.pi / 3), np.sin(np.pi / 3)
    figures = measure_outputs(
        "speaker_embedding", [({"speaker_embedding": ours}, {"speaker_embedding": theirs})]
    )
    assert figures["cosine_mean"] == pytest.approx(0.75)
    assert figures["cosine_worst"] == pytest.approx(0.5)


def test_language_model_divergence() -> None:
    """Logits 0, 0 against 0, ln 3: KL = ln(2/sqrt(3)); a shift of all logits says nothing."""
    ours = np.zeros((1, 2), np.float32)
    theirs = np.array([[7, 7 + np.log(3)]], np.float32)
    figures = measure_outputs("speech_lm", [({"logits": ours}, {"logits": theirs})])
    assert figures["divergence"] == pytest.approx(np.log(2 / np.sqrt(3)), abs=1e-6)
    assert figures["next_token_agreement"] == 0
    figures = measure_outputs("speech_lm", [({"logits": ours + 1}, {"logits": ours + 8})])
    assert figures["divergence"] == pytest.approx(0, abs=1e-12)


def test_figures_are_gathered_over_all_feeds() -> None:
    """An SNR is that of all energy, not a mean of decibels: one exact feed halves the error's share."""
    exact, noisy = (waveform(SPEECH), waveform(SPEECH)), (waveform(SPEECH), waveform(SPEECH * 1.1))
    expected = 20 + 10 * np.log10(2)
    assert measure_outputs("vocoder", [exact, noisy])["waveform_snr"] == pytest.approx(expected, abs=1e-3)


# ---- what is broken -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_single_nan_makes_every_figure_the_worst(poison: float) -> None:
    broken = SPEECH.copy()
    broken[0, 100] = poison
    pairs = [(waveform(SPEECH), waveform(SPEECH)), (waveform(SPEECH), waveform(broken))]
    figures = measure_outputs("vocoder", pairs)
    worst = {metric.name: metric.worst for metric in METRICS["vocoder"]}
    assert figures == worst | {"not_finite": pytest.approx(100 / 48_000, rel=1e-3)}
    assert not passes("vocoder", "int8", figures)
    assert failures("vocoder", "int8", figures)[0] == "NaN or infinite is 0.00208%, allowed is at most 0%"


def test_nan_does_not_hide_in_a_choice() -> None:
    """The other row still agrees, but nothing that computes NaN agrees with anything."""
    ours = RNG.normal(size=(2, 50)).astype(np.float32)
    theirs = ours.copy()
    theirs[1, 7] = np.nan
    figures = measure_outputs("speech_lm", [({"logits": ours}, {"logits": theirs})])
    assert figures["next_token_agreement"] == 0


def test_nan_in_what_the_next_chunk_hears_is_noticed() -> None:
    pair = [waveform(SPEECH) | {"phase_out": np.array([[phase]], np.float32)} for phase in (0.5, np.nan)]
    assert measure_outputs("vocoder", [(pair[0], pair[1])])["not_finite"] > 0


def test_fp32_that_is_not_finite_is_no_reference() -> None:
    broken = waveform(SPEECH * np.float32(np.nan))
    with pytest.raises(EvaluationError, match="FP32's own 'waveform' is not finite"):
        measure_outputs("vocoder", [(broken, broken)])


def test_another_length_is_refused() -> None:
    frames = np.zeros((1, 30, 80), np.float32)
    with pytest.raises(EvaluationError, match=r"counts \[29\] as 'frame_count', FP32 \[30\]"):
        measure_outputs("flow", [(mel(frames), mel(frames, 29))])
    with pytest.raises(EvaluationError, match=r"'mel' is \(1, 29, 80\), FP32's is \(1, 30, 80\)"):
        measure_outputs("flow", [(mel(frames), mel(frames[:, :29], 30))])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(EvaluationError, match="no feed was given"):
        measure_outputs("flow", [])
    with pytest.raises(
        EvaluationError, match="There are no metrics of 'tts'; there are of speaker_embedding"
    ):
        measure_outputs("tts", [])


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(EvaluationError, match=r"model\.onnx: ONNX Runtime refuses the graph"):
        measure("flow", tmp_path / "model.onnx", tmp_path / "model.onnx", [])


# ---- tolerances ---------------------------------------------------------------------------------------


def test_every_figure_must_be_within_its_tolerance() -> None:
    figures = {"not_finite": 0.0, "mel_snr": 21.0, "mel_distance": 0.9}
    assert passes("flow", "int8", figures)
    assert failures("flow", "fp16", figures) == (
        "mel SNR is 21.0 dB, allowed is at least 40.0 dB",
        "mel distance is 0.900 dB, allowed is at most 0.100 dB",
    )
    assert passes("flow", "fp32", figures), "FP32 has no tolerance to itself"


def test_a_figure_that_was_not_measured_does_not_pass() -> None:
    assert failures("flow", "int8", {"not_finite": 0.0, "mel_snr": 30.0}) == (
        "mel distance was not measured",
    )


def test_nan_is_within_no_tolerance() -> None:
    figures = {"not_finite": 0.0, "mel_snr": float("nan"), "mel_distance": 0.0}
    assert not passes("flow", "int8", figures)


@pytest.mark.parametrize("model", METRICS)
def test_table_is_consistent(model: str) -> None:
    """INT8 may not be asked for more than FP16, and what only informs says so."""
    for metric in METRICS[model]:
        assert metric.reason.endswith(".")
        if not metric.tolerance:
            assert metric.reason.startswith("Informs:")
            continue
        assert set(metric.tolerance) == {"fp16", "int8"}
        assert metric.accepts("int8", metric.tolerance["fp16"]), metric.name
        assert not metric.accepts("int8", metric.worst), metric.name


# ---- graphs -------------------------------------------------------------------------------------------


def feed_of(stage: Stage, seed: int = 0) -> Feed:
    """Three rows of up to a second, of different lengths."""

    def short(dim: Dim) -> Dim:
        if dim.base is not None:
            return short(dim.base).times(dim.factor, dim.name)
        return replace(dim, opt=max(dim.min, min(dim.opt, 16_000 if dim.name.startswith("samples") else 16)))

    def tensor(given: Tensor) -> Tensor:
        dims = tuple(short(d) if isinstance(d, Dim) else d for d in given.dims)
        return replace(given, dims=dims, counts=given.counts and short(given.counts))

    return replace(stage, inputs=tuple(map(tensor, stage.inputs))).sample(batch=3, seed=seed)


def language_model_feed(path: Path, new_counts: tuple[int, ...]) -> Feed:
    """Rows behind 10 positions of a cache of random numbers."""
    sizes = {"batch": len(new_counts), "new": max(new_counts), "capacity": 64}
    feed: Feed = {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        kind = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        real = kind.elem_type == TensorProto.FLOAT
        feed[value.name] = RNG.normal(size=shape).astype("f4") if real else np.full(shape, 10, np.int32)
    return feed | {"new_counts": np.array(new_counts, np.int32)}


def text_encoder_feed(_: Path) -> Feed:
    return {
        "text_ids": RNG.integers(0, 100, (1, 12)).astype(np.int32),
        "speaker_embedding": RNG.normal(size=(1, 192)).astype(np.float32),
    }


def graph_and_feed(model: str, repositories: Callable[[Family], Path]) -> tuple[Path, Feed]:
    if model == "text_encoder":
        path = version_directory(repositories(COSYVOICE1), "speech_lm") / "text_encoder.onnx"
        return path, text_encoder_feed(path)
    path = version_directory(repositories(COSYVOICE2), model) / FP32_GRAPH
    if model == "speech_lm":
        return path, language_model_feed(path, (3, 1, 2))
    return path, feed_of(getattr(pipeline_of(COSYVOICE2), model))


def spoil(source: Path, target: Path, amount: float) -> Path:
    """A copy whose layers have weights with noise of `amount` times their deviation."""
    model, rng = onnx.load(source), np.random.default_rng(1)
    used = {node.input[1] for node in model.graph.node if node.op_type in ("MatMul", "Conv", "Gemm")}
    for weight in model.graph.initializer:
        if weight.name in used and weight.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(weight)
            noise = rng.normal(0, amount * float(np.std(array)), array.shape)
            weight.CopyFrom(numpy_helper.from_array((array + noise).astype(np.float32), weight.name))
    onnx.save(model, target)
    return target


@pytest.mark.parametrize("model", sorted(METRICS.keys() - {"prompt_mel", "tts_stream"}))
# The one has no weights, the other those of the flow, and one row.
def test_spoilt_weights_move_every_figure(
    model: str, repositories: Callable[[Family], Path], tmp_path: Path
) -> None:
    """FP32 is at its floor within every tolerance; a little noise is worse, much noise worse still."""
    path, feed = graph_and_feed(model, repositories)
    own = floor(model, path, [feed])
    assert passes(model, "fp16", own), own
    little = measure(model, path, spoil(path, tmp_path / "little.onnx", 0.01), [feed])
    much = measure(model, path, spoil(path, tmp_path / "much.onnx", 3.0), [feed])
    assert own["not_finite"] == little["not_finite"] == much["not_finite"] == 0
    assert not passes(model, "int8", much), much
    for metric in METRICS[model]:
        figures = [
            -f[metric.name] if metric.better == "lower" else f[metric.name] for f in (own, little, much)
        ]
        assert figures[0] >= figures[1] >= figures[2], metric.name
        assert figures[0] > figures[2], metric.name


def test_a_graph_is_exactly_itself(tiny_repository: Path) -> None:
    path = version_directory(tiny_repository, "flow") / FP32_GRAPH
    feeds = [feed_of(pipeline_of(COSYVOICE2).flow, seed) for seed in (0, 1)]
    figures = measure("flow", path, path, iter(feeds), threads=1)
    assert figures == {"not_finite": 0, "mel_snr": distances.EXACT_DB, "mel_distance": 0}


def test_rows_that_got_no_new_id_are_not_judged(tiny_repository: Path, tmp_path: Path) -> None:
    """The logits of such a row are of whatever its padding holds."""
    path = version_directory(tiny_repository, "speech_lm") / FP32_GRAPH
    feed = language_model_feed(path, (2, 0))
    spoilt = spoil(path, tmp_path / "spoilt.onnx", 0.3)
    alone = {name: array[:1] for name, array in feed.items()}
    both, one = (measure("speech_lm", path, spoilt, [f]) for f in (feed, alone))
    assert both["divergence"] == pytest.approx(one["divergence"], rel=1e-3)


def chain(path: Path, products: int, dtype: int = TensorProto.FLOAT) -> Path:
    """A graph whose speaker embedding is a waveform multiplied by matrices, one after another."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    matrix = numpy_helper.from_array(np.eye(192, dtype=kind), "matrix")
    values = ["waveform", *(f"v{i}" for i in range(products - 1)), "speaker_embedding"]
    nodes = [helper.make_node("MatMul", [values[i], "matrix"], [values[i + 1]]) for i in range(products)]
    shape: list[str | int] = ["batch", 192]
    ends = [helper.make_tensor_value_info(name, dtype, shape) for name in (values[0], values[-1])]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], [matrix])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_half_precision_inputs_are_given_half_precision(tmp_path: Path) -> None:
    full, half = chain(tmp_path / "a.onnx", 1), chain(tmp_path / "b.onnx", 1, TensorProto.FLOAT16)
    feed = {"waveform": RNG.normal(size=(4, 192)).astype(np.float32)}
    figures = measure("speaker_embedding", full, half, [feed])
    assert 1 - 1e-6 < figures["cosine_worst"] < 1


def test_speed_is_how_many_times_as_fast(tmp_path: Path) -> None:
    """Twenty times the products take a good deal longer, whichever of the two is called FP32."""
    slow, fast = chain(tmp_path / "slow.onnx", 40), chain(tmp_path / "fast.onnx", 2)
    feed = {"waveform": RNG.normal(size=(256, 192)).astype(np.float32)}
    assert speed_ratio(slow, fast, [feed], threads=1) > 2
    assert speed_ratio(fast, slow, [feed], threads=1) < 0.5
    with pytest.raises(EvaluationError, match="nothing to time"):
        speed_ratio(slow, fast, [])


def test_figures_fit_into_json() -> None:
    """Also those of a variant that is equal, and of one that is broken: JSON knows no infinity."""
    pairs: Mapping[str, Array] = {"equal": SPEECH, "broken": SPEECH * np.float32(np.inf)}
    for variant in pairs.values():
        figures = measure_outputs("vocoder", [(waveform(SPEECH), waveform(variant))])
        assert np.isfinite(list(figures.values())).all()
