"""Acoustic features against the official front end's outputs, alone, in ragged batches and as ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cosytriton_ensemble.pipeline import COUNT_16K, COUNT_24K, WAVEFORM_16K, WAVEFORM_24K
from cosytriton_ensemble.spec import Array, Dim, Stage
from cosytriton_ensemble.spec import Tensor as TensorSpec
from cosytriton_export.errors import CheckpointError
from cosytriton_export.features import KaldiFbank, MelSpectrogram, PromptMel, WhisperLogMel, mean_normalised
from cosytriton_export.filterbanks import kaldi_filters, slaney_filters
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import load_hyperyaml

GOLDEN = Path(__file__).parents[1] / "golden"

# Largest absolute errors of the logarithms. The official Kaldi features are themselves 1e-4 away from a
# float64 computation; those here are 2e-5 away.
LOG_MEL_TOLERANCE = 5e-5
FBANK_TOLERANCE = 2e-4
FBANK_FLOAT64_TOLERANCE = 5e-5
MEL_TOLERANCE = 3e-5
ROW_TOLERANCE = 1e-5  # between a row of a batch and the same row alone
ONNX_TOLERANCE = 2e-5
MIN_SECONDS, MAX_SECONDS = 0.25, 30

EXTRACTORS: dict[str, tuple[type[nn.Module], int]] = {
    "log_mel": (WhisperLogMel, 16_000),
    "fbank": (KaldiFbank, 16_000),
    "mel": (MelSpectrogram, 24_000),
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "frontend.safetensors")


@pytest.fixture(params=EXTRACTORS)
def extractor(request: pytest.FixtureRequest) -> tuple[str, nn.Module, int]:
    kind, rate = EXTRACTORS[request.param]
    return request.param, kind(), rate


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def noise(seconds: float, rate: int, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(1, round(seconds * rate), generator=torch.Generator().manual_seed(seed))


def ragged_batch(rate: int) -> tuple[Tensor, Tensor]:
    """Three recordings; what stands behind the short ones is loud, to be noticed."""
    lengths = (round(1.3 * rate), round(0.83 * rate) + 7, round(MIN_SECONDS * rate))
    batch = torch.full((3, lengths[0]), 0.9)
    for row, length in enumerate(lengths):
        batch[row, :length] = noise(length / rate, rate, seed=row)
    return batch, counts(*lengths)


def expected_of(golden: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, float]:
    """Waveform, official features [bins, T] and tolerance."""
    return {
        "log_mel": (golden["wav16"], golden["whisper_logmel128"][0], LOG_MEL_TOLERANCE),
        "fbank": (golden["wav16"], golden["kaldi_fbank80"].T, FBANK_TOLERANCE),
        "mel": (golden["wav24"], golden["mel_v2_24k_fmax8000"][0], MEL_TOLERANCE),
    }[name]


def test_features_are_the_official_ones(
    golden: dict[str, Tensor], extractor: tuple[str, nn.Module, int]
) -> None:
    name, module, _ = extractor
    waveform, expected, tolerance = expected_of(golden, name)
    features, frames = module(waveform, counts(waveform.shape[1]))
    assert frames.dtype == torch.int32
    assert frames.tolist() == [[expected.shape[1]]]
    torch.testing.assert_close(features[0], expected, atol=tolerance, rtol=0)


def test_mean_normalised_fbank_is_the_official_one(golden: dict[str, Tensor]) -> None:
    waveform = golden["wav16"]
    features = mean_normalised(*KaldiFbank()(waveform, counts(waveform.shape[1])))
    torch.testing.assert_close(features[0].T, golden["kaldi_fbank80_cmn"], atol=FBANK_TOLERANCE, rtol=0)


def test_mel_without_upper_limit_goes_to_half_the_rate(golden: dict[str, Tensor]) -> None:
    waveform = golden["wav24"]
    features, _ = MelSpectrogram(high=None)(waveform, counts(waveform.shape[1]))
    torch.testing.assert_close(features, golden["mel_v3_24k_fmaxNone"], atol=MEL_TOLERANCE, rtol=0)


def test_fbank_equals_kaldis_steps_in_float64(golden: dict[str, Tensor]) -> None:
    samples = golden["wav16"][0].double().numpy()
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    rows = []
    for start in range(0, len(samples) - 399, 160):
        frame = samples[start : start + 400]
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, 512)) ** 2
        rows.append(np.log(np.maximum(kaldi_filters(16_000, 512, 80) @ power, np.finfo(np.float32).eps)))
    features, _ = KaldiFbank()(golden["wav16"], counts(len(samples)))
    np.testing.assert_allclose(features[0].T.numpy(), np.stack(rows), atol=FBANK_FLOAT64_TOLERANCE)


def test_a_row_does_not_depend_on_its_batch(extractor: tuple[str, nn.Module, int]) -> None:
    _, module, rate = extractor
    batch, lengths = ragged_batch(rate)
    features, frames = module(batch, lengths)
    for row, length in enumerate(lengths[:, 0].tolist()):
        alone, count = module(batch[row : row + 1, :length], counts(length))
        valid = int(count)
        assert int(frames[row]) == valid == alone.shape[2]
        torch.testing.assert_close(features[row, :, :valid], alone[0], atol=ROW_TOLERANCE, rtol=0)
        assert not features[row, :, valid:].any()


def test_longest_reference_and_an_empty_one(extractor: tuple[str, nn.Module, int]) -> None:
    name, module, rate = extractor
    waveform = noise(MAX_SECONDS, rate)
    features, frames = module(waveform, counts(MAX_SECONDS * rate))
    assert int(frames) == features.shape[2] == {"log_mel": 3000, "fbank": 2998, "mel": 1500}[name]
    assert features.isfinite().all()
    empty, none = module(noise(1, rate), counts(0))
    assert int(none) == 0
    assert not empty.any()


def test_only_valid_frames_set_the_dynamic_range() -> None:
    # A click at the very end lies beyond the last frame, but the frames of the padding would see it.
    recording = 1e-3 * noise(1, 16_000)[:, : 16_000 - 1]
    recording[0, -1] = 1
    count = counts(recording.shape[1])
    alone, frames = WhisperLogMel()(recording, count)
    padded, _ = WhisperLogMel()(torch.nn.functional.pad(recording, (0, 16_000)), count)
    torch.testing.assert_close(padded[:, :, : int(frames)], alone, atol=ROW_TOLERANCE, rtol=0)


def test_onnx_equals_torch_in_a_ragged_batch(
    tmp_path: Path, golden: dict[str, Tensor], extractor: tuple[str, nn.Module, int]
) -> None:
    name, module, rate = extractor
    waveform, expected, tolerance = expected_of(golden, name)
    inputs = (WAVEFORM_16K, COUNT_16K) if rate == 16_000 else (WAVEFORM_24K, COUNT_24K)
    features = TensorSpec("features", "FP32", (expected.shape[0], Dim("frames", 1, 100, 3000)))
    stage = Stage(name, inputs, (features, TensorSpec("frame_count", "INT32", (1,))), max_batch=4)
    export_stage(stage, module, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def run(batch: Tensor, lengths: Tensor) -> tuple[Array, Array]:
        features, frames = session.run(None, {inputs[0].name: batch.numpy(), inputs[1].name: lengths.numpy()})
        return features, frames

    batch, lengths = ragged_batch(rate)
    given, frames = run(batch, lengths)
    wanted, wanted_frames = module(batch, lengths)
    np.testing.assert_array_equal(frames, wanted_frames.numpy())
    np.testing.assert_allclose(given, wanted.numpy(), atol=ONNX_TOLERANCE)
    official, _ = run(waveform, counts(waveform.shape[1]))
    np.testing.assert_allclose(official[0], expected.numpy(), atol=tolerance)


def test_slaney_filters_have_unit_area() -> None:
    filters = slaney_filters(24_000, 1920, 80, 0, 8000)
    width = 24_000 / 1920  # Hz per Fourier bin
    # The narrow triangles at the bottom are sampled by few bins; from there on the area is one.
    np.testing.assert_allclose(filters.sum(axis=1)[40:] * width, 1, atol=5e-3)
    assert not filters[:, int(8000 / width) + 1 :].any()


class TestPromptMel:
    @pytest.fixture
    def config(self) -> dict[str, dict[str, object]]:
        return {"feat_extractor": dict(load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")["feat_extractor"])}

    def test_sizes_come_from_the_yaml(
        self, golden: dict[str, Tensor], config: dict[str, dict[str, object]]
    ) -> None:
        waveform = golden["wav24"]
        mel, frames = PromptMel.from_config(config)(waveform, counts(waveform.shape[1]))
        torch.testing.assert_close(
            mel.transpose(1, 2), golden["mel_v2_24k_fmax8000"], atol=MEL_TOLERANCE, rtol=0
        )
        assert int(frames) == mel.shape[1]

    def test_no_upper_limit_in_the_yaml(
        self, golden: dict[str, Tensor], config: dict[str, dict[str, object]]
    ) -> None:
        config["feat_extractor"] |= {"fmax": None}
        waveform = golden["wav24"]
        mel, _ = PromptMel.from_config(config)(waveform, counts(waveform.shape[1]))
        torch.testing.assert_close(
            mel.transpose(1, 2), golden["mel_v3_24k_fmaxNone"], atol=MEL_TOLERANCE, rtol=0
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda node: node.pop("hop_size"), "hop_size"),
            (lambda node: node.update(sampling_rate=22_050), "22050 Hz"),
            (lambda node: node.update(win_size=1024), "win_size 1024"),
            (lambda node: node.update(center=True), "center True"),
            (lambda node: node.update(n_fft="wide"), "cannot be read"),
        ],
    )
    def test_what_is_not_understood_is_refused(
        self,
        config: dict[str, dict[str, object]],
        change: Callable[[dict[str, object]], object],
        message: str,
    ) -> None:
        change(config["feat_extractor"])
        with pytest.raises(CheckpointError, match=message):
            PromptMel.from_config(config)

    def test_a_yaml_without_extractor_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="feat_extractor"):
            PromptMel.from_config({})
