"""The parts that only the causal vocoder of CosyVoice 3 has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cosytriton_ensemble.families import COSYVOICE3
from cosytriton_export.hift import HiftConfig
from cosytriton_export.hift_causal import (
    NOISE_SECONDS,
    CausalConvolution,
    CausalPitchPredictor,
    CausalVocoder,
    uniform_noise,
)
from cosytriton_export.hift_source import HarmonicSource, SourceConfig, staircase
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.vocoder import build_vocoder
from cosytriton_export.weights import fold_weight_norm

GOLDEN = Path(__file__).parents[1] / "golden"
F0_TOLERANCE = 3e-4  # Hz; the weight norm is folded in float32, the official one in float64
HOP = COSYVOICE3.mel_hop


@pytest.fixture(scope="module")
def config() -> Config:
    return load_hyperyaml(GOLDEN / "cosyvoice3_tiny.yaml")


@pytest.fixture(scope="module")
def vocoder(config: Config, golden: Callable[[str], Any]) -> CausalVocoder:
    weights = {key: torch.from_numpy(value) for key, value in golden("hift_v3_weights").items()}
    sizes, state = HiftConfig.from_yaml(config["hift"]), fold_weight_norm(weights)
    noise = uniform_noise(config["flow"], sizes.source)
    made = build_vocoder(COSYVOICE3, sizes, state, "golden weights", noise).requires_grad_(False)
    assert isinstance(made, CausalVocoder)
    return made


class TestConvolution:
    def x(self) -> Tensor:
        return torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(
        ("sizes", "behind", "ahead"),
        [
            ({"kernel": 7}, 6, 0),
            ({"kernel": 3, "dilation": 5}, 10, 0),
            ({"kernel": 5, "look_ahead": True}, 0, 4),
        ],
    )
    def test_sees_so_many_inputs(self, sizes: dict[str, Any], behind: int, ahead: int) -> None:
        conv, x, place = CausalConvolution(3, 4, **sizes), self.x(), 12
        changed = x.clone()
        changed[:, :, place] += 1
        moved = (conv(x) - conv(changed)).abs().sum((0, 1)).nonzero().flatten()
        assert conv(x).shape[2] == x.shape[2]
        assert (int(moved[0]), int(moved[-1])) == (place - ahead, place + behind)

    def test_strides_up_to_the_begin_of_the_next_output(self) -> None:
        conv, x = CausalConvolution(3, 4, 6, stride=3).requires_grad_(False), self.x()[:, :, :22]
        assert conv(x).shape[2] == 7
        wanted = functional.conv1d(x[:, :, 4:10], conv.weight, conv.bias)
        assert torch.allclose(conv(x)[:, :, 2:3], wanted, atol=1e-5)

    def test_repeats_its_inputs_before(self) -> None:
        plain, up = CausalConvolution(3, 4, 7), CausalConvolution(3, 4, 7, upsampling=3)
        up.load_state_dict(plain.state_dict())
        assert torch.equal(up(self.x()), plain(self.x().repeat_interleave(3, dim=2)))


class TestPitch:
    def test_is_the_official_one_in_float64(
        self, vocoder: CausalVocoder, golden: Callable[[str], Any]
    ) -> None:
        official = golden("hift_v3")
        mel = torch.from_numpy(official["mel"])
        f0 = vocoder.f0_predictor(mel, torch.ones(1, 1, mel.shape[2]))
        assert f0.dtype == torch.float64
        official.assert_close("f0_float64", f0, atol=F0_TOLERANCE)

    def test_is_computed_in_float64_by_onnx_runtime_too(self, vocoder: CausalVocoder, tmp_path: Path) -> None:
        mel, mask = torch.randn(1, 80, 20, generator=torch.Generator().manual_seed(0)), torch.ones(1, 1, 20)
        torch.onnx.export(vocoder.f0_predictor, (mel, mask), tmp_path / "f0.onnx", verbose=False)
        session = ort.InferenceSession(tmp_path / "f0.onnx")
        given = session.run(None, {"mel": mel.numpy(), "mask": mask.numpy()})[0]
        assert given.dtype == np.float64
        np.testing.assert_allclose(given, vocoder.f0_predictor(mel, mask).numpy(), rtol=1e-12)

    def test_equals_plain_convolutions(self) -> None:
        torch.manual_seed(0)
        predictor, mel = CausalPitchPredictor(80, 16).requires_grad_(False).double(), torch.randn(2, 80, 12)
        x, reach = mel.double(), (0, 3)
        for layer in predictor.condnet:
            if isinstance(layer, nn.Conv1d):
                x = functional.conv1d(functional.pad(x, reach), layer.weight, layer.bias)
                reach = (2, 0)
            else:
                x = layer(x)
        wanted = predictor.classifier(x.transpose(1, 2)).squeeze(2).abs()
        assert torch.allclose(predictor(mel, torch.ones(2, 1, 12)), wanted, atol=1e-12)


class TestNoise:
    def test_is_the_official_buffer(self, golden: Callable[[str], Any]) -> None:
        full = SourceConfig(24_000, HOP, 80, 512, 9, 0.1, 0.003, 10)
        flow = {"vocab_size": 6561, "input_size": 80, "spk_embed_dim": 192, "output_size": 80}
        noise, head = uniform_noise(flow, full), golden("cosyvoice3_fixed_hift_noise_head")["sine_waves_head"]
        assert noise.shape == (NOISE_SECONDS * full.sample_rate, full.harmonics)
        assert np.array_equal(noise[: len(head)], head)

    def test_is_mixed_and_stored_once_per_sample(self, vocoder: CausalVocoder, config: Config) -> None:
        source = vocoder.m_source
        noise = uniform_noise(config["flow"], source.config)
        assert source.noise.shape == (NOISE_SECONDS * source.config.sample_rate,)
        wanted = noise[12_345:12_350] @ source.l_linear.weight[0]
        assert torch.allclose(source.noise[12_345:12_350], wanted, atol=1e-7)


class TestStream:
    def speak(self, vocoder: CausalVocoder, mel: Tensor, finalize: bool) -> Tensor:
        return self.continued(vocoder, mel, finalize, 0, torch.zeros(1, 1), -1)[0]

    def continued(
        self, vocoder: CausalVocoder, mel: Tensor, finalize: bool, start: int, phase: Tensor, phase_frame: int
    ) -> tuple[Tensor, Tensor]:
        """The final samples of frames that begin at `start`, and the phase."""
        count, offset, frame = (
            torch.tensor([[number]], dtype=torch.int32) for number in (mel.shape[1], start * HOP, phase_frame)
        )
        waveform, samples, phase = vocoder(
            mel, count, torch.tensor([[finalize]]), offset, phase.to(mel.dtype), frame
        )
        return waveform[0, : int(samples)], phase

    def test_unfinished_samples_stay_as_they_are(
        self, vocoder: CausalVocoder, golden: Callable[[str], Any]
    ) -> None:
        """More frames never change what was spoken; so no cross-fade is needed."""
        exact = vocoder.double()
        mel = torch.from_numpy(golden("hift_v3")["mel"]).transpose(1, 2).double()
        whole = self.speak(exact, mel, finalize=True)
        assert len(whole) == mel.shape[1] * HOP
        for frames in (4, 8, 9, 15, 23):
            early = self.speak(exact, mel[:, :frames], finalize=False)
            assert len(early) == max(0, frames - vocoder.unfinished) * HOP
            assert torch.allclose(early, whole[: len(early)], atol=1e-9)
        vocoder.float()

    def test_a_chunk_behind_its_context_sounds_as_in_the_whole(self, vocoder: CausalVocoder) -> None:
        exact, context = vocoder.double(), vocoder.context
        mel = torch.randn(1, 140, 80, generator=torch.Generator().manual_seed(0)).double()
        whole = self.speak(exact, mel, finalize=True)
        head, phase = self.continued(exact, mel[:, :60], False, 0, torch.zeros(1, 1), -1)
        spoken = len(head) // HOP
        for end in (100, 140):
            start = spoken - context
            chunk, phase = self.continued(exact, mel[:, start:end], end == 140, start, phase, context - 1)
            wanted = whole[spoken * HOP : start * HOP + len(chunk)]
            assert torch.allclose(chunk[context * HOP :], wanted, atol=1e-8)
            spoken = start + len(chunk) // HOP
        assert spoken == 140
        vocoder.float()

    def test_the_context_is_what_a_sample_depends_on(self, config: Config) -> None:
        """All of it and nothing before, by the gradient; a source that is no sine leaves the phase out."""
        torch.manual_seed(0)
        sizes = HiftConfig.from_yaml(config["hift"])
        vocoder = CausalVocoder(sizes, HarmonicSource(sizes.source, staircase), sizes.look_ahead).double()
        mel, frame = torch.randn(1, 80, 50, dtype=torch.float64, requires_grad=True), 44
        with torch.enable_grad():
            pitch = vocoder.f0_predictor(mel, torch.ones(1, 1, 50))
            source = pitch.unsqueeze(2).expand(-1, -1, HOP).flatten(1)
            waveform = vocoder.decode(mel, source, torch.tensor([[50]]))
            (gradient,) = torch.autograd.grad(waveform[0, frame * HOP : frame * HOP + 8].sum(), mel)
        reached = gradient.abs().sum((0, 1)).nonzero().flatten()
        assert reached[0] == frame - vocoder.context
        assert reached[-1] == frame + sizes.look_ahead
        assert vocoder.context == COSYVOICE3.context_frames
