"""The vocoder against the official HiFT of CosyVoice 2, as PyTorch module and as ONNX graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cosytriton_ensemble.pipeline import COSYVOICE2, VOCODER
from cosytriton_ensemble.spec import Feed
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.graph import export_stage
from cosytriton_export.hift import HiftConfig, Vocoder
from cosytriton_export.hift_source import NOISE_LENGTH, HarmonicSource, noise_table
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.weights import fold_weight_norm, load_weights

Outputs = list[npt.NDArray[Any]]
Run = Callable[[Feed], Outputs]

GOLDEN = Path(__file__).parents[1] / "golden"
F0_TOLERANCE = 3e-4  # Hz
SOURCE_TOLERANCE = 3e-4  # the official phase is float32
LAYER_TOLERANCE = 1e-4
WAVE_TOLERANCE = 1e-4  # from the official source
OWN_SOURCE_TOLERANCE = 1e-2  # the exponential of the magnitudes amplifies an error of the source
OWN_SOURCE_RMS = 2e-3  # of a signal whose rms is 0.2
PAIR_TOLERANCE = 2e-2  # between two runs that both predict the source
EXACT_TOLERANCE = 1e-8  # in float64, where no order of summation hides a wrong sample at an edge
PHASE_TOLERANCE = 1e-3  # of a unit sine after 60 s; official float32 radians reach 0.2
HOP = COSYVOICE2.mel_hop
OVERLAP = COSYVOICE2.overlap_samples


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "hift_v2.safetensors")


@pytest.fixture(scope="module")
def table() -> Tensor:
    return load_file(GOLDEN / "hift_noise_tables.safetensors")["normal_table"]


def make_vocoder(noise: Tensor | None = None) -> Vocoder:
    config = load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")
    vocoder = Vocoder(HiftConfig.from_yaml(config["hift"]), noise)
    state = fold_weight_norm(load_file(GOLDEN / "hift_v2_weights.safetensors"))
    load_weights(vocoder, state, "hift_v2_weights.safetensors")
    return vocoder.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def vocoder(table: Tensor) -> Vocoder:
    return make_vocoder(table)


@pytest.fixture(scope="module")
def session(vocoder: Vocoder, tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    path = tmp_path_factory.mktemp("vocoder") / "model.onnx"
    export_stage(VOCODER, vocoder, path)
    return ort.InferenceSession(path)


def run_torch(vocoder: Vocoder, feed: Feed) -> Outputs:
    return [output.numpy() for output in vocoder(*(torch.from_numpy(feed[t.name]) for t in VOCODER.inputs))]


@pytest.fixture(params=["torch", "onnx"])
def run(request: pytest.FixtureRequest, vocoder: Vocoder) -> Run:
    if request.param == "torch":
        return lambda feed: run_torch(vocoder, feed)
    session: ort.InferenceSession = request.getfixturevalue("session")
    return lambda feed: session.run(None, feed)


def make_feed(mel: Tensor, cache: Tensor | None = None, noise_offset: int = 0) -> Feed:
    """The stage's inputs for one unpadded mel [1, bins, frames] and a source cache [n]."""
    source_cache = torch.zeros(1, OVERLAP)
    if cache is not None:
        source_cache[0, : len(cache)] = cache
    counts = {
        "frame_count": mel.shape[2],
        "source_cache_count": 0 if cache is None else len(cache),
        "noise_offset": noise_offset,
    }
    return {
        "mel": mel.transpose(1, 2).contiguous().numpy(),
        "source_cache": source_cache.numpy(),
        **{name: np.array([[count]], np.int32) for name, count in counts.items()},
    }


def make_batch(rows: list[Feed]) -> Feed:
    """One feed of several, whose padding holds noise that must not be heard."""
    rng = np.random.default_rng(0)
    longest = max(row["mel"].shape[1] for row in rows)
    mel = rng.normal(0, 3, (len(rows), longest, rows[0]["mel"].shape[2])).astype(rows[0]["mel"].dtype)
    for padded, row in zip(mel, rows, strict=True):
        padded[: row["mel"].shape[1]] = row["mel"]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0] if name != "mel"} | {
        "mel": mel
    }


def unequal_rows(golden: dict[str, Tensor]) -> list[Feed]:
    """Chunks of unequal length, cache and place."""
    mel, source = golden["mel"], golden["source"][0, 0]
    return [
        make_feed(mel[:, :, :12], source[:1000], noise_offset=77),
        make_feed(mel, None, noise_offset=100_000),
        make_feed(mel[:, :, 5:20], source[:OVERLAP]),
        make_feed(mel[:, :, 7:8]),
    ]


def largest(difference: Any) -> float:
    return float(abs(difference).max())


def rms(signal: Any) -> float:
    return float(np.sqrt(np.mean(np.square(signal))))


class Sines(nn.Module):
    """The harmonics alone, as a graph."""

    def __init__(self, source: HarmonicSource) -> None:
        super().__init__()
        self.source = source

    def forward(self, pitch: Tensor) -> Tensor:
        return self.source.sines(pitch)


class TestSource:
    def test_pitch(self, vocoder: Vocoder, golden: dict[str, Tensor]) -> None:
        f0 = vocoder.f0_predictor(golden["mel"], torch.ones(1, 1, golden["mel"].shape[2]))
        assert largest(f0 - golden["f0"]) < F0_TOLERANCE

    def test_harmonics_and_noise(self, vocoder: Vocoder, golden: dict[str, Tensor], table: Tensor) -> None:
        wanted = golden["sine_waves"][0]  # [samples, harmonics]
        config = vocoder.config.source
        voiced = (
            (golden["f0"][0] > config.voiced_threshold).float().repeat_interleave(HOP)[: len(wanted), None]
        )
        sines = vocoder.m_source.sines(golden["f0"])[0].T[: len(wanted)]
        noise = table[torch.arange(wanted.numel()) % len(table)].view_as(wanted)
        loudness = voiced * config.noise_sigma + (1 - voiced) * config.sine_amplitude / 3
        given = sines * config.sine_amplitude * voiced + noise * loudness
        assert largest(given - wanted) < SOURCE_TOLERANCE

    def test_source(self, vocoder: Vocoder, golden: dict[str, Tensor]) -> None:
        frames = torch.tensor([[golden["f0"].shape[1]]], dtype=torch.int32)
        source = vocoder.m_source(golden["f0"], frames, torch.zeros_like(frames))
        assert largest(source - golden["source"][0]) < SOURCE_TOLERANCE

    @pytest.mark.parametrize("form", ["torch", "onnx"])
    def test_phase_stays_precise_over_a_minute(self, form: str, vocoder: Vocoder, tmp_path: Path) -> None:
        frames = 60 * COSYVOICE2.sample_rate // HOP
        time = torch.arange(frames)
        pitch = (180 + 60 * (time / 20).sin() + (time * 0.7).cos())[None]
        harmonic = torch.arange(1, vocoder.config.source.harmonics + 1)[None, :, None]
        steps = pitch.double()[:, None] * harmonic / COSYVOICE2.sample_rate % 1
        cycles = nn.functional.interpolate(steps.cumsum(2) * HOP, scale_factor=HOP, mode="linear")
        wanted = torch.sin(2 * torch.pi * cycles)
        if form == "torch":
            given = vocoder.m_source.sines(pitch)
        else:  # ONNX Runtime sums in float32, torch in float64
            torch.onnx.export(Sines(vocoder.m_source), (pitch,), tmp_path / "sines.onnx", verbose=False)
            session = ort.InferenceSession(tmp_path / "sines.onnx")
            given = torch.from_numpy(session.run(None, {"pitch": pitch.numpy()})[0])
        assert largest(given - wanted) < PHASE_TOLERANCE

    def test_phase_stands_still_behind_the_last_centre_of_a_shorter_row(self, vocoder: Vocoder) -> None:
        pitch = torch.tensor([[200.0, 210, 220, 230, 240], [200, 210, 220, 0, 0]])
        alone = vocoder.m_source.sines(pitch[1:, :3])
        assert torch.equal(vocoder.m_source.sines(pitch)[1:, :, : alone.shape[2]], alone)


class TestNoise:
    FRAMES = 600  # 12 s, longer than the table

    @pytest.fixture
    def source(self) -> HarmonicSource:
        return make_vocoder().m_source

    def noise(self, source: HarmonicSource, frames: int, offset: int) -> Tensor:
        """The source of unvoiced frames: nothing but noise."""
        count = torch.tensor([[frames]], dtype=torch.int32)
        heard: Tensor = source(torch.zeros(1, frames), count, torch.tensor([[offset]], dtype=torch.int32))
        return heard[0]

    def test_a_chunk_hears_the_noise_of_its_place(self, source: HarmonicSource) -> None:
        whole = self.noise(source, self.FRAMES, 0)
        for start in (1, 37, 590):
            assert torch.equal(self.noise(source, self.FRAMES - start, start * HOP), whole[start * HOP :])

    def test_is_the_table_by_position_and_harmonic(self, source: HarmonicSource) -> None:
        table, offset, samples = noise_table(), 5_000_000_00, torch.arange(2 * HOP)
        harmonics = source.config.harmonics
        index = ((offset + samples)[:, None] * harmonics + torch.arange(harmonics)) % NOISE_LENGTH
        wanted = torch.tanh(source.l_linear(table[index] * source.config.sine_amplitude / 3))[:, 0]
        assert largest(self.noise(source, 2, offset) - wanted) < 1e-6

    def test_repeats_after_ten_seconds_only(self, source: HarmonicSource) -> None:
        whole = self.noise(source, self.FRAMES, 0)
        assert 10 * COSYVOICE2.sample_rate < NOISE_LENGTH
        assert torch.equal(whole[NOISE_LENGTH:], whole[: len(whole) - NOISE_LENGTH])
        # A prime length shares no factor with the harmonics, so that no part of the table is left out.
        assert all(NOISE_LENGTH % divisor for divisor in range(2, 513))

    def test_table_is_standard_normal_and_fixed(self) -> None:
        table = noise_table()
        assert abs(float(table.mean())) < 0.01
        assert abs(float(table.std()) - 1) < 0.01
        assert torch.equal(table, noise_table())


class TestLayers:
    LAYERS = (
        ("conv_pre", "conv_pre"),
        ("up0", "ups.0"),
        ("up1", "ups.1"),
        ("up2", "ups.2"),
        ("source_down0", "source_downs.0"),
        ("source_res0", "source_resblocks.0"),
        ("res0_0", "resblocks.0"),
        ("res1_0", "resblocks.3"),
        ("conv_post", "conv_post"),
    )

    @pytest.fixture
    def heard(self, vocoder: Vocoder, golden: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the layers, and the waveform, from the official source."""
        outputs: dict[str, Tensor] = {}
        hooks = [
            vocoder.get_submodule(module).register_forward_hook(
                lambda _module, _inputs, output, name=name: outputs.update({name: output})
            )
            for name, module in self.LAYERS
        ]
        frames = torch.tensor([[golden["mel"].shape[2]]], dtype=torch.int32)
        outputs["wav"] = vocoder.decode(golden["mel"], golden["source"][0], frames)
        for hook in hooks:
            hook.remove()
        return outputs

    def test_spectrum_of_the_source(self, vocoder: Vocoder, golden: dict[str, Tensor]) -> None:
        source = golden["source"][0]
        spectrum = vocoder.stft(source, torch.tensor([[source.shape[1]]], dtype=torch.int32))
        wanted = torch.cat([golden["source_stft_real"], golden["source_stft_imag"]], dim=1)
        assert largest(spectrum[:, :, : wanted.shape[2]] - wanted) < 1e-5

    @pytest.mark.parametrize("name", [name for name, _ in LAYERS])
    def test_layer(self, name: str, heard: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
        wanted = golden[name]
        assert largest(heard[name][:, :, : wanted.shape[2]] - wanted) < LAYER_TOLERANCE

    def test_waveform(self, heard: dict[str, Tensor], golden: dict[str, Tensor]) -> None:
        assert largest(heard["wav"] - golden["wav"]) < WAVE_TOLERANCE


def check_speech(outputs: Outputs, wav: Tensor, source: Tensor) -> None:
    assert outputs[2].tolist() == [[wav.shape[1]]]
    assert largest(outputs[1] - source[0].numpy()) < SOURCE_TOLERANCE
    assert largest(outputs[0] - wav.numpy()) < OWN_SOURCE_TOLERANCE
    assert rms(outputs[0] - wav.numpy()) < OWN_SOURCE_RMS


class TestStage:
    def test_speaks_as_the_official_vocoder(self, run: Run, golden: dict[str, Tensor]) -> None:
        check_speech(run(make_feed(golden["mel"])), golden["wav"], golden["source"])

    def test_speaks_without_noise(self, golden: dict[str, Tensor], table: Tensor) -> None:
        silent = make_vocoder(torch.zeros_like(table))
        outputs = run_torch(silent, make_feed(golden["mel"]))
        check_speech(outputs, golden["wav_nonoise"], golden["source_nonoise"])

    def test_continues_a_cached_source(self, run: Run, golden: dict[str, Tensor]) -> None:
        cache = golden["cached_source_in"][0, 0]
        outputs = run(make_feed(golden["mel"][:, :, 4:], cache))
        assert np.array_equal(outputs[1][0, : len(cache)], cache.numpy())
        check_speech(outputs, golden["cached.wav"], golden["cached.source"])

    def test_rows_of_given_source_sound_as_they_do_alone(self, run: Run, golden: dict[str, Tensor]) -> None:
        # A cache as long as the row is its whole source; what remains is the filter.
        lengths = (COSYVOICE2.overlap_frames, 5, 1, 3)
        rows = [
            make_feed(golden["mel"][:, :, i : i + n], golden["source"][0, 0, i * HOP : (i + n) * HOP])
            for i, n in enumerate(lengths)
        ]
        waveform, source, counts = run(make_batch(rows))
        assert counts[:, 0].tolist() == [n * HOP for n in lengths]
        for i, row in enumerate(rows):
            alone, count = run(row)[0][0], lengths[i] * HOP
            assert largest(waveform[i, :count] - alone) < 2 * WAVE_TOLERANCE
            assert np.array_equal(source[i, :count], row["source_cache"][0, :count])
            assert not waveform[i, count:].any()
            assert not source[i, count:].any()

    def test_rows_of_own_source_sound_as_they_do_alone(self, run: Run, golden: dict[str, Tensor]) -> None:
        rows = unequal_rows(golden)
        waveform, source, counts = run(make_batch(rows))
        for i, row in enumerate(rows):
            alone, count = run(row), int(counts[i, 0])
            assert largest(source[i, :count] - alone[1][0]) < SOURCE_TOLERANCE
            assert largest(waveform[i, :count] - alone[0][0]) < PAIR_TOLERANCE
            assert rms(waveform[i, :count] - alone[0][0]) < OWN_SOURCE_RMS
            assert not waveform[i, count:].any()
            assert not source[i, count:].any()

    def test_rows_are_exactly_independent(self, golden: dict[str, Tensor], table: Tensor) -> None:
        exact, rows = make_vocoder(table).double(), unequal_rows(golden)
        for row in rows:
            row["mel"] = row["mel"].astype(np.float64)
        waveform, source, counts = run_torch(exact, make_batch(rows))
        for i, row in enumerate(rows):
            alone, count = run_torch(exact, row), int(counts[i, 0])
            assert largest(source[i, :count] - alone[1][0]) < EXACT_TOLERANCE
            assert largest(waveform[i, :count] - alone[0][0]) < EXACT_TOLERANCE

    def test_an_empty_row_harms_nobody(self, run: Run, golden: dict[str, Tensor]) -> None:
        row = make_feed(golden["mel"])
        empty = row | {"frame_count": np.zeros((1, 1), np.int32)}
        waveform, _, counts = run(make_batch([empty, row]))
        assert counts[0, 0] == 0
        assert not waveform[0].any()
        assert largest(waveform[1] - run(row)[0][0]) < PAIR_TOLERANCE


class TestCheckpoint:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        """A vocoder as adversarial training saves it, with weight norm and a prefix."""
        state = load_file(GOLDEN / "hift_v2_weights.safetensors")
        torch.save({f"generator.{key}": value for key, value in state.items()}, tmp_path / "hift.pt")
        return Checkpoint(tmp_path, COSYVOICE2, load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml"))

    def test_sounds_like_the_official_weights(
        self, checkpoint: Checkpoint, golden: dict[str, Tensor], table: Tensor
    ) -> None:
        given, wanted = Vocoder.from_checkpoint(checkpoint), make_vocoder(table)
        assert given.state_dict().keys() == wanted.state_dict().keys()
        frames = torch.tensor([[golden["mel"].shape[2]]], dtype=torch.int32)
        with torch.no_grad():
            speech = [v.decode(golden["mel"], golden["source"][0], frames) for v in (given, wanted)]
        assert torch.equal(*speech)

    def test_refuses_other_rates_than_the_family_has(self, checkpoint: Checkpoint) -> None:
        checkpoint.config["hift"]["istft_params"]["hop_len"] = 8
        with pytest.raises(CheckpointError, match="960 samples per mel frame"):
            Vocoder.from_checkpoint(checkpoint)

    def test_names_weights_that_do_not_fit(self, checkpoint: Checkpoint) -> None:
        checkpoint.config["hift"]["base_channels"] = 64
        with pytest.raises(CheckpointError, match=r"hift\.pt.*conv_pre\.bias"):
            Vocoder.from_checkpoint(checkpoint)
