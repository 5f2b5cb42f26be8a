"""Acoustic features against the official front end's outputs, alone, in ragged batches and as ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.spec import Array, Dim, Stage
from cosytriton_ensemble.spec import Tensor as TensorSpec
from cosytriton_export.errors import CheckpointError
from cosytriton_export.features import KaldiFbank, MelSpectrogram, PromptMel, WhisperLogMel, mean_normalised
from cosytriton_export.filterbanks import kaldi_filters, slaney_filters
from cosytriton_export.graph import export_stage
from cosytriton_export.hyperyaml import load_hyperyaml

if TYPE_CHECKING:
    from tests.conftest import Golden

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

EXTRACTORS: dict[str, Callable[[], nn.Module]] = {
    "log_mel": WhisperLogMel,
    "fbank": KaldiFbank,
    "mel_v1": lambda: MelSpectrogram(22_050, 1024, 256),
    "mel_v2": MelSpectrogram,
    "mel_v3": lambda: MelSpectrogram(high=None),
}
RATES = {"log_mel": 16_000, "fbank": 16_000, "mel_v1": 22_050, "mel_v2": 24_000, "mel_v3": 24_000}
FAMILIES = {"mel_v1": COSYVOICE1, "mel_v2": COSYVOICE2, "mel_v3": COSYVOICE3}
# Name of the recording, of its official features, and their largest error. The official mel spectrograms are
# those of longer recordings: their frames end before they would see the mirrored end of what is kept.
EXPECTED = {
    "log_mel": ("wav16", "whisper_logmel128", LOG_MEL_TOLERANCE),
    "fbank": ("wav16", "kaldi_fbank80", FBANK_TOLERANCE),
    "mel_v1": ("wav22", "mel_v1_22k_fmax8000", MEL_TOLERANCE),
    "mel_v2": ("wav24", "mel_v2_24k_fmax8000", MEL_TOLERANCE),
    "mel_v3": ("wav24", "mel_v3_24k_fmaxNone", MEL_TOLERANCE),
}


@pytest.fixture
def frontend(golden: Callable[[str], Golden]) -> Golden:
    return golden("frontend")


@pytest.fixture(params=EXTRACTORS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def extractor(name: str) -> tuple[str, nn.Module, int]:
    return name, EXTRACTORS[name](), RATES[name]


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


def recording(frontend: Golden, name: str) -> Tensor:
    return torch.from_numpy(frontend[EXPECTED[name][0]])


def assert_official(frontend: Golden, name: str, features: Array) -> None:
    """Compare features [1, bins, T] with the official ones."""
    _, key, tolerance = EXPECTED[name]
    if name == "fbank":
        features = features[0].T
    elif name != "log_mel":
        features = features[:, :, : frontend.shapes[key][2]]
    frontend.assert_close(key, features, atol=tolerance)


def test_features_are_the_official_ones(frontend: Golden, extractor: tuple[str, nn.Module, int]) -> None:
    name, module, _ = extractor
    waveform = recording(frontend, name)
    features, frames = module(waveform, counts(waveform.shape[1]))
    assert frames.dtype == torch.int32
    assert frames.tolist() == [[features.shape[2]]]
    assert_official(frontend, name, features.numpy())


def test_mean_normalised_fbank_is_the_official_one(frontend: Golden, golden: Callable[[str], Golden]) -> None:
    waveform = recording(frontend, "fbank")
    features = mean_normalised(*KaldiFbank()(waveform, counts(waveform.shape[1])))
    golden("campplus_tiny").assert_close("in", features.transpose(1, 2), atol=FBANK_TOLERANCE)


def test_fbank_equals_kaldis_steps_in_float64(frontend: Golden) -> None:
    waveform = recording(frontend, "fbank")
    samples = waveform[0].double().numpy()
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    rows = []
    for start in range(0, len(samples) - 399, 160):
        frame = samples[start : start + 400]
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, 512)) ** 2
        rows.append(np.log(np.maximum(kaldi_filters(16_000, 512, 80) @ power, np.finfo(np.float32).eps)))
    features, _ = KaldiFbank()(waveform, counts(len(samples)))
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
    expected = {"log_mel": 3000, "fbank": 2998, "mel_v1": 2583, "mel_v2": 1500, "mel_v3": 1500}
    assert int(frames) == features.shape[2] == expected[name]
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
    tmp_path: Path, frontend: Golden, extractor: tuple[str, nn.Module, int]
) -> None:
    name, module, rate = extractor
    samples = Dim("samples", rate // 4, 5 * rate, 30 * rate, rate)
    inputs = (
        TensorSpec("waveform", "FP32", (samples,)),
        TensorSpec("sample_count", "INT32", (1,), counts=samples),
    )
    bins = 128 if name == "log_mel" else 80
    features = TensorSpec("features", "FP32", (bins, Dim("frames", 1, 100, 3000)))
    stage = Stage(name, inputs, (features, TensorSpec("frame_count", "INT32", (1,))), max_batch=4)
    export_stage(stage, module, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def run(batch: Tensor, lengths: Tensor) -> tuple[Array, Array]:
        features, frames = session.run(None, {"waveform": batch.numpy(), "sample_count": lengths.numpy()})
        return features, frames

    batch, lengths = ragged_batch(rate)
    given, frames = run(batch, lengths)
    wanted, wanted_frames = module(batch, lengths)
    np.testing.assert_array_equal(frames, wanted_frames.numpy())
    np.testing.assert_allclose(given, wanted.numpy(), atol=ONNX_TOLERANCE)
    waveform = recording(frontend, name)
    official, _ = run(waveform, counts(waveform.shape[1]))
    assert_official(frontend, name, official)


def test_slaney_filters_have_unit_area() -> None:
    filters = slaney_filters(24_000, 1920, 80, 0, 8000)
    width = 24_000 / 1920  # Hz per Fourier bin
    # The narrow triangles at the bottom are sampled by few bins; from there on the area is one.
    np.testing.assert_allclose(filters.sum(axis=1)[40:] * width, 1, atol=5e-3)
    assert not filters[:, int(8000 / width) + 1 :].any()


YAMLS = {"mel_v1": "cosyvoice_tiny", "mel_v2": "cosyvoice2_tiny", "mel_v3": "cosyvoice3_tiny"}


class TestPromptMel:
    @pytest.fixture
    def config(self) -> dict[str, dict[str, object]]:
        return {"feat_extractor": dict(load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")["feat_extractor"])}

    @pytest.mark.parametrize("name", YAMLS)
    def test_sizes_come_from_the_yaml(self, frontend: Golden, name: str) -> None:
        config = load_hyperyaml(GOLDEN / f"{YAMLS[name]}.yaml")
        waveform = recording(frontend, name)
        mel, frames = PromptMel.from_config(config, FAMILIES[name])(waveform, counts(waveform.shape[1]))
        assert_official(frontend, name, mel.transpose(1, 2).numpy())
        assert int(frames) == mel.shape[1] == waveform.shape[1] // FAMILIES[name].mel_hop

    @pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE3], ids=lambda family: family.name)
    def test_another_familys_yaml_is_refused_where_it_differs(
        self, config: dict[str, dict[str, object]], family: Family
    ) -> None:
        if family is COSYVOICE3:
            config["feat_extractor"] |= {"hop_size": 256}
        with pytest.raises(CheckpointError, match=family.config_file):
            PromptMel.from_config(config, family)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda node: node.pop("hop_size"), "hop_size"),
            (lambda node: node.update(sampling_rate=22_050), "22050 Hz"),
            (lambda node: node.update(num_mels=100), "100 bins"),
            (lambda node: node.update(win_size=1024), "win_size 1024"),
            (lambda node: node.update(center=True), "center True"),
            (lambda node: node.update(n_fft="wide"), "cannot be read"),
            (lambda node: node.update(fmax="high"), "cannot be read"),
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
            PromptMel.from_config(config, COSYVOICE2)

    def test_a_yaml_without_extractor_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="feat_extractor"):
            PromptMel.from_config({}, COSYVOICE2)
