"""The excitation of the vocoders: its phase and noise against the official one and against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_export.hift_source import (
    NOISE_LENGTH,
    HarmonicSource,
    PhasePath,
    SourceConfig,
    between_centres,
    carry_phase,
    initial_phases,
    last_phase,
    normal_noise,
    staircase,
    summed_over_samples,
)

SOURCE_TOLERANCE = 3e-4  # the official phase is float32
PHASE_TOLERANCE = 1e-3  # of a unit sine after 60 s; official float32 radians reach 0.2
JOINT_TOLERANCE = 1e-4  # of a unit sine behind a joint
HARMONICS = 9
PATHS: dict[str, PhasePath] = {
    COSYVOICE1.name: summed_over_samples,
    COSYVOICE2.name: between_centres,
    COSYVOICE3.name: staircase,
}
FAMILIES = pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE2, COSYVOICE3], ids=lambda f: f.name)
CARRYING = pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE2], ids=lambda f: f.name)


def config_of(family: Family) -> SourceConfig:
    return SourceConfig(
        sample_rate=family.sample_rate,
        mel_hop=family.mel_hop,
        mel_bins=80,
        pitch_channels=32,
        harmonics=HARMONICS,
        sine_amplitude=0.1,
        noise_sigma=0.003,
        voiced_threshold=10,
    )


def source_of(family: Family, initial_phase: Tensor | None = None) -> HarmonicSource:
    """With random weights and no noise."""
    torch.manual_seed(0)
    return HarmonicSource(config_of(family), PATHS[family.name], initial_phase).requires_grad_(False)


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)[:, None]


def largest(difference: Any) -> float:
    return float(abs(difference).max())


def golden_noise(family: Family, table: Tensor, samples: int) -> Tensor:
    """The table by position and harmonic, as the official code's noise was replaced with it, [4093, 9]."""
    position, harmonic = torch.arange(len(table))[:, None], torch.arange(HARMONICS)
    official_shape_is_harmonic_major = family is COSYVOICE1
    index = (
        position + harmonic * samples if official_shape_is_harmonic_major else position * HARMONICS + harmonic
    )
    return table[index % len(table)]


class TestGolden:
    @pytest.fixture(params=[COSYVOICE1, COSYVOICE2, COSYVOICE3], ids=lambda f: f.name)
    def family(self, request: pytest.FixtureRequest) -> Family:
        family: Family = request.param
        return family

    @pytest.fixture
    def official(self, family: Family, golden: Callable[[str], Any]) -> Any:
        return golden(f"hift_v{family.name[-1]}")

    @pytest.fixture
    def noise(self, family: Family, official: Any, golden: Callable[[str], Any]) -> Tensor:
        table = golden("hift_noise_tables")["uniform_table" if family is COSYVOICE3 else "normal_table"]
        return golden_noise(family, torch.from_numpy(table), official["f0"].size * family.mel_hop)

    @pytest.fixture
    def source(self, family: Family, noise: Tensor, golden: Callable[[str], Any]) -> HarmonicSource:
        phase = torch.from_numpy(golden("hift_noise_tables")["phase_vec"]) / (2 * torch.pi)
        phase[0] = 0  # the official code overwrites it
        source = source_of(family, phase if family is COSYVOICE1 else None)
        weights = golden(f"hift_v{family.name[-1]}_weights")
        for name in ("weight", "bias"):
            getattr(source.l_linear, name).copy_(torch.from_numpy(weights[f"m_source.l_linear.{name}"]))
        source.mix_noise(noise)
        return source

    def test_harmonics_and_noise(
        self, family: Family, official: Any, source: HarmonicSource, noise: Tensor
    ) -> None:
        config, pitch = source.config, torch.from_numpy(official["f0"])
        voiced = (pitch[0] > config.voiced_threshold).float().repeat_interleave(family.mel_hop)[:2048, None]
        sines = source.sines(pitch, source.cycles(pitch))[0].T[:2048]
        heard = noise[torch.arange(len(sines)) % len(noise)]
        loudness = voiced * config.noise_sigma + (1 - voiced) * config.sine_amplitude / 3
        given = sines * config.sine_amplitude * voiced + heard * loudness
        official.assert_close("sine_waves", given[None], atol=SOURCE_TOLERANCE)

    def test_source(self, official: Any, source: HarmonicSource) -> None:
        pitch = torch.from_numpy(official["f0"])
        given = source(pitch, source.cycles(pitch), counts(pitch.shape[1]), counts(0))
        official.assert_close("source", given[None], atol=SOURCE_TOLERANCE)


class Sines(nn.Module):
    """The harmonics alone, as a graph."""

    def __init__(self, source: HarmonicSource) -> None:
        super().__init__()
        self.source = source

    def forward(self, pitch: Tensor) -> Tensor:
        return self.source.sines(pitch, self.source.cycles(pitch))


def exact_sines(family: Family, pitch: Tensor) -> Tensor:
    """The harmonics in float64, by the official formulas: [1, T] -> [1, harmonics, T * mel_hop]."""
    hop = family.mel_hop
    harmonic = torch.arange(1, HARMONICS + 1)[None, :, None]
    steps = pitch.double()[:, None] * harmonic / family.sample_rate % 1
    if family is COSYVOICE1:
        cycles = steps.repeat_interleave(hop, dim=2).cumsum(2)
    else:
        mode = "linear" if family is COSYVOICE2 else "nearest"
        cycles = nn.functional.interpolate(steps.cumsum(2) * hop, scale_factor=hop, mode=mode)
    return torch.sin(2 * torch.pi * cycles)


class TestPhase:
    @FAMILIES
    @pytest.mark.parametrize("form", ["torch", "onnx"])
    def test_stays_precise_over_a_minute(self, family: Family, form: str, tmp_path: Path) -> None:
        time = torch.arange(60 * family.sample_rate // family.mel_hop)
        pitch = (180 + 60 * (time / 20).sin() + (time * 0.7).cos())[None]
        sines = Sines(source_of(family))
        if form == "torch":
            given = sines(pitch)
        else:  # ONNX Runtime sums in float32, torch in float64
            torch.onnx.export(sines, (pitch,), tmp_path / "sines.onnx", verbose=False)
            session = ort.InferenceSession(tmp_path / "sines.onnx")
            given = torch.from_numpy(session.run(None, {"pitch": pitch.numpy()})[0])
        assert largest(given - exact_sines(family, pitch)) < PHASE_TOLERANCE

    @FAMILIES
    def test_of_a_shorter_row_is_that_of_the_row_alone(self, family: Family) -> None:
        source = source_of(family)
        pitch = torch.tensor([[200.0, 210, 220, 230, 240], [200, 210, 220, 0, 0]])
        cycles, alone = source.cycles(pitch), source.cycles(pitch[1:, :3])
        wanted = source.sines(pitch[1:, :3], alone)
        assert torch.equal(source.sines(pitch, cycles)[1:, :, : wanted.shape[2]], wanted)
        assert torch.equal(last_phase(cycles, counts(5, 3))[1:], last_phase(alone, counts(3)))

    def test_begins_anew_without_a_carried_one(self) -> None:
        cycles = source_of(COSYVOICE2).cycles(torch.rand(2, 30) * 300)
        assert torch.equal(carry_phase(cycles, torch.zeros(2, 1), counts(-1, -1)), cycles)

    def test_is_the_carried_one_at_its_frame(self) -> None:
        cycles = source_of(COSYVOICE2).cycles(torch.rand(3, 30) * 300)
        phase = torch.tensor([[0.25], [0.5], [0.75]])
        carried = carry_phase(cycles, phase, counts(0, 17, -1))
        assert carried[0, 0] == 0.25
        assert carried[1, 17] == 0.5
        assert torch.allclose(carried.diff(dim=1), cycles.diff(dim=1), atol=1e-6)
        assert torch.allclose(carried[2, 0], cycles[2, 0] + 0.75)

    def test_initial_phases_are_fixed_and_spread(self) -> None:
        phases = initial_phases(HARMONICS)
        assert phases[0] == 0
        assert float(phases.min()) >= 0
        assert float(phases.max()) < 1
        assert len(set(phases.tolist())) == HARMONICS
        assert torch.equal(phases, initial_phases(HARMONICS))


class TestJoint:
    """A source in two chunks, whose second begins `overlap` frames before the end of the first."""

    FIRST, OVERLAP = 40, 8

    def pitch(self) -> Tensor:
        time = torch.arange(90)
        return (220 + 40 * (time / 9).sin())[None]

    def kept(self, family: Family) -> int:
        """Samples of the overlap that are taken from the first chunk, as the module's docstring says."""
        behind_reference = family.mel_hop // 2 if family is COSYVOICE2 else 0
        return self.OVERLAP * family.mel_hop - behind_reference

    def chunked(self, family: Family, kept: int, carried: bool) -> Tensor:
        source, pitch = source_of(family, initial_phases(HARMONICS)), self.pitch()
        first, second = pitch[:, : self.FIRST], pitch[:, self.FIRST - self.OVERLAP :]
        former, cycles = source.cycles(first), source.cycles(second)
        if carried:
            cycles = carry_phase(
                cycles, last_phase(former, counts(former.shape[1])), counts(self.OVERLAP - 1)
            )
        border = (self.FIRST - self.OVERLAP) * family.mel_hop + kept
        return torch.cat(
            [source.sines(first, former)[:, :, :border], source.sines(second, cycles)[:, :, kept:]], dim=2
        )

    def whole(self, family: Family) -> Tensor:
        source = source_of(family, initial_phases(HARMONICS))
        return source.sines(self.pitch(), source.cycles(self.pitch()))

    @CARRYING
    def test_is_not_heard(self, family: Family) -> None:
        assert largest(self.chunked(family, self.kept(family), True) - self.whole(family)) < JOINT_TOLERANCE

    @CARRYING
    def test_would_be_a_jump_without_the_phase(self, family: Family) -> None:
        assert largest(self.chunked(family, self.kept(family), False) - self.whole(family)) > 0.5

    def test_would_be_a_jump_behind_the_last_centre(self) -> None:
        """The last half frame of a chunk of CosyVoice 2 stands still: it is wrong for the next chunk."""
        kept = self.OVERLAP * COSYVOICE2.mel_hop
        assert largest(self.chunked(COSYVOICE2, kept, True) - self.whole(COSYVOICE2)) > 0.5


class TestNoise:
    FRAMES = 600  # 12 s, longer than the noise

    @pytest.fixture
    def source(self) -> HarmonicSource:
        source = source_of(COSYVOICE2)
        source.mix_noise(normal_noise(HARMONICS))
        return source

    def noise(self, source: HarmonicSource, frames: int, offset: int) -> Tensor:
        """The source of unvoiced frames: nothing but noise."""
        silence = torch.zeros(1, frames)
        heard: Tensor = source(silence, silence, counts(frames), counts(offset))
        return heard[0]

    def test_a_chunk_hears_the_noise_of_its_place(self, source: HarmonicSource) -> None:
        whole, hop = self.noise(source, self.FRAMES, 0), COSYVOICE2.mel_hop
        for start in (1, 37, 590):
            assert torch.equal(self.noise(source, self.FRAMES - start, start * hop), whole[start * hop :])

    def test_is_the_row_of_its_position(self, source: HarmonicSource) -> None:
        offset, samples = 5_000_000_00, torch.arange(2 * COSYVOICE2.mel_hop)
        row = normal_noise(HARMONICS)[(offset + samples) % NOISE_LENGTH]
        wanted = torch.tanh(source.l_linear(row * source.config.sine_amplitude / 3))[:, 0]
        assert largest(self.noise(source, 2, offset) - wanted) < 1e-6

    def test_repeats_after_ten_seconds_only(self, source: HarmonicSource) -> None:
        whole = self.noise(source, self.FRAMES, 0)
        assert 10 * COSYVOICE2.sample_rate < NOISE_LENGTH
        assert torch.equal(whole[NOISE_LENGTH:], whole[: len(whole) - NOISE_LENGTH])
        # A prime length shares no factor with the harmonics, so that no part of the table is left out.
        assert all(NOISE_LENGTH % divisor for divisor in range(2, 513))

    def test_is_standard_normal_fixed_and_another_for_each_harmonic(self) -> None:
        noise = normal_noise(HARMONICS)
        assert noise.shape == (NOISE_LENGTH, HARMONICS)
        assert abs(float(noise.mean())) < 0.01
        assert abs(float(noise.std()) - 1) < 0.01
        assert largest(np.corrcoef(noise.T) - np.eye(HARMONICS)) < 0.01
        assert torch.equal(noise, normal_noise(HARMONICS))
