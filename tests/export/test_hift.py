"""The vocoders of the three families against the official HiFT, as PyTorch modules and as ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.spec import Feed
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.graph import export_stage
from cosytriton_export.hift import HiftConfig, Vocoder
from cosytriton_export.hift_causal import CausalVocoder
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.vocoder import build_vocoder, vocoder_of
from cosytriton_export.weights import fold_weight_norm

Outputs = dict[str, npt.NDArray[Any]]
Run = Callable[[Feed], Outputs]
AnyVocoder = Vocoder | CausalVocoder

GOLDEN = Path(__file__).parents[1] / "golden"
F0_TOLERANCE = 3e-4  # Hz
SOURCE_TOLERANCE = 3e-4  # the official phase is float32
LAYER_TOLERANCE = 5e-4  # of values up to 20; CPUs of two makers differ by 2e-4
WAVE_TOLERANCE = {"cosyvoice1": 1e-4, "cosyvoice2": 1e-4, "cosyvoice3": 3e-4}  # from the official source
OWN_SOURCE_TOLERANCE = 1e-2  # the exponential of the magnitudes amplifies an error of the source
OWN_SOURCE_RMS = 2e-3  # of a signal whose rms is 0.2
PAIR_TOLERANCE = 2e-2  # between two runs that both predict the source
EXACT_TOLERANCE = 1e-8  # in float64, where no order of summation hides a wrong sample at an edge
FRAMES = 24  # of the golden mel
CACHED = 4  # golden frames before those that continue a cached source

CACHING = [COSYVOICE1, COSYVOICE2]
BOTH_LAYERS = ("conv_pre", "up0", "up1", "source_down0", "source_res0", "res0_0", "res1_0", "conv_post")
MODULES = {
    "up0": "ups.0",
    "up1": "ups.1",
    "up2": "ups.2",
    "source_down0": "source_downs.0",
    "source_res0": "source_resblocks.0",
    "res0_0": "resblocks.0",
    "res1_0": "resblocks.3",
}


def golden_noise(family: Family, tables: dict[str, Any]) -> Tensor:
    """What the harmonics hear in the golden runs, [positions, 9]: a table replaced the random numbers.

    The official noise restarts in each call, and that of CosyVoice 1 has the harmonics first, so that it
    depends on the length of the call. Behind the noise of the one-shot call stands that of the call with a
    cached source.
    """
    table = torch.from_numpy(tables["uniform_table" if family is COSYVOICE3 else "normal_table"])
    harmonic, calls = torch.arange(9), []
    for frames in (FRAMES, FRAMES - CACHED):
        samples = frames * family.mel_hop
        position = torch.arange(samples)[:, None]
        index = position + harmonic * samples if family is COSYVOICE1 else position * 9 + harmonic
        calls.append(table[index % len(table)])
    return torch.cat(calls)


def golden_config(family: Family) -> Any:
    return load_hyperyaml(GOLDEN / f"{family.config_file.removesuffix('.yaml')}_tiny.yaml")


@pytest.fixture(scope="module", params=[COSYVOICE1, COSYVOICE2, COSYVOICE3], ids=lambda f: f.name)
def family(request: pytest.FixtureRequest) -> Family:
    family: Family = request.param
    return family


@pytest.fixture(scope="module")
def official(family: Family, golden: Callable[[str], Any]) -> Any:
    return golden(f"hift_v{family.name[-1]}")


@pytest.fixture(scope="module")
def mel(official: Any) -> Tensor:
    return torch.from_numpy(official["mel"])


@pytest.fixture(scope="module")
def make(family: Family, golden: Callable[[str], Any]) -> Callable[[], AnyVocoder]:
    tables = golden("hift_noise_tables")
    weights = golden(f"hift_v{family.name[-1]}_weights")
    phases = torch.from_numpy(tables["phase_vec"]) / (2 * torch.pi)
    phases[0] = 0  # the official code overwrites it
    state = fold_weight_norm({key: torch.from_numpy(value) for key, value in weights.items()})
    config = HiftConfig.from_yaml(golden_config(family)["hift"])

    def build() -> AnyVocoder:
        noise = golden_noise(family, tables)
        return build_vocoder(family, config, state, "golden weights", noise, phases).requires_grad_(False)

    return build


@pytest.fixture(scope="module")
def vocoder(make: Callable[[], AnyVocoder]) -> AnyVocoder:
    return make()


@pytest.fixture(scope="module")
def session(
    family: Family, vocoder: AnyVocoder, tmp_path_factory: pytest.TempPathFactory
) -> ort.InferenceSession:
    path = tmp_path_factory.mktemp(family.name) / "model.onnx"
    export_stage(pipeline_of(family).vocoder, vocoder, path)
    return ort.InferenceSession(path)


def run_torch(family: Family, vocoder: AnyVocoder, feed: Feed) -> Outputs:
    stage = pipeline_of(family).vocoder
    outputs = vocoder(*(torch.from_numpy(feed[tensor.name]) for tensor in stage.inputs))
    return {tensor.name: out.numpy() for tensor, out in zip(stage.outputs, outputs, strict=True)}


@pytest.fixture(params=["torch", pytest.param("onnx", marks=pytest.mark.full)])
def run(request: pytest.FixtureRequest, family: Family, vocoder: AnyVocoder) -> Run:
    if request.param == "torch":
        return lambda feed: run_torch(family, vocoder, feed)
    session: ort.InferenceSession = request.getfixturevalue("session")
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def make_feed(family: Family, mel: Tensor, **given: Any) -> Feed:
    """The stage's inputs for one unpadded mel [1, bins, frames]: a first chunk, but for what is `given`."""
    feed: Feed = {
        "mel": mel.transpose(1, 2).contiguous().numpy(),
        "frame_count": np.array([[mel.shape[2]]], np.int32),
    }
    if family is COSYVOICE3:
        feed |= {"finalize": np.array([[given.get("finalize", True)]])}
    else:
        cache = given.get("cache", np.zeros(0, np.float32))
        feed |= {
            "source_cache": np.pad(cache, (0, family.overlap_samples - len(cache)))[None],
            "source_cache_count": np.array([[len(cache)]], np.int32),
        }
    return feed | {
        "noise_offset": np.array([[given.get("noise_offset", 0)]], np.int32),
        "phase": np.array([[given.get("phase", 0)]], np.float32),
        "phase_frame": np.array([[given.get("phase_frame", -1)]], np.int32),
    }


def make_batch(rows: list[Feed]) -> Feed:
    """One feed of several, whose padding holds noise that must not be heard."""
    rng = np.random.default_rng(0)
    longest = max(row["mel"].shape[1] for row in rows)
    mel = rng.normal(0, 3, (len(rows), longest, rows[0]["mel"].shape[2])).astype(rows[0]["mel"].dtype)
    for padded, row in zip(mel, rows, strict=True):
        padded[: row["mel"].shape[1]] = row["mel"]
    others = {name: np.concatenate([row[name] for row in rows]) for name in rows[0] if name != "mel"}
    return {"mel": mel} | others


def unequal_rows(family: Family, official: Any) -> list[Feed]:
    """Chunks of unequal length, cache, phase and place; in CosyVoice 3 some are not the last."""
    mel, source = torch.from_numpy(official["mel"]), official["source"][0, 0]
    overlap = family.overlap_samples
    return [
        make_feed(family, mel[:, :, :12], cache=source[:1000], noise_offset=77, phase=0.3, finalize=False),
        make_feed(family, mel, noise_offset=100_000),
        make_feed(family, mel[:, :, 5:20], cache=source[:overlap], phase=0.9, phase_frame=6),
        make_feed(family, mel[:, :, 7:8], finalize=False),
        make_feed(family, mel[:, :, 7:8]),
    ]


def largest(difference: Any) -> float:
    return float(abs(difference).max(initial=0))


def rms(signal: Any) -> float:
    return float(np.sqrt(np.sum(np.square(signal)) / max(1, signal.size)))


class TestLayers:
    @pytest.fixture
    def heard(self, vocoder: AnyVocoder, mel: Tensor, official: Any) -> dict[str, Tensor]:
        """Outputs of the layers, and the waveform, from the official source."""
        outputs: dict[str, Tensor] = {}
        layers = (*BOTH_LAYERS, "up2") if len(vocoder.ups) == 3 else BOTH_LAYERS
        hooks = [
            vocoder.get_submodule(MODULES.get(name, name)).register_forward_hook(
                lambda _module, _inputs, output, name=name: outputs.update({name: output})
            )
            for name in layers
        ]
        source = torch.from_numpy(official["source"][0])
        outputs["wav"] = vocoder.decode(mel, source, torch.tensor([[FRAMES]], dtype=torch.int32))
        for hook in hooks:
            hook.remove()
        outputs["conv_post"] = outputs["conv_post"][:, :, :1024]
        return outputs

    def test_pitch(self, vocoder: AnyVocoder, mel: Tensor, official: Any) -> None:
        f0 = vocoder.f0_predictor(mel, torch.ones(1, 1, FRAMES))
        official.assert_close("f0", f0.float(), atol=F0_TOLERANCE)

    def test_spectrum_of_the_source(self, vocoder: AnyVocoder, official: Any) -> None:
        source = torch.from_numpy(official["source"][0])
        spectrum = vocoder.stft(source, torch.tensor([[source.shape[1]]], dtype=torch.int32))[:, :, :64]
        for name, part in zip(("real", "imag"), spectrum.chunk(2, dim=1), strict=True):
            official.assert_close(f"source_stft_{name}", part, atol=1e-5)

    @pytest.mark.parametrize("name", [*BOTH_LAYERS, "up2"])
    def test_layer(self, name: str, heard: dict[str, Tensor], official: Any) -> None:
        assert (name in heard) == (name in official)
        if name in official:
            official.assert_close(name, heard[name], atol=LAYER_TOLERANCE)

    def test_waveform(self, family: Family, heard: dict[str, Tensor], official: Any) -> None:
        official.assert_close("wav", heard["wav"], atol=WAVE_TOLERANCE[family.name])


def check_row(alone: Outputs, batch: Outputs, row: int, tolerance: float, rms_tolerance: float) -> None:
    """Row `row` of a batch sounds as it does alone, and there is silence behind it."""
    count = batch["sample_count"][row, 0]
    assert alone["sample_count"] == count
    waveform = batch["waveform"][row]
    assert largest(waveform[:count] - alone["waveform"][0, :count]) < tolerance
    assert rms(waveform[:count] - alone["waveform"][0, :count]) < rms_tolerance
    assert not waveform[count:].any()
    if "source" in batch:
        source = batch["source"][row]
        assert largest(source[:count] - alone["source"][0]) < min(tolerance, SOURCE_TOLERANCE)
        assert not source[count:].any()
        assert largest(batch["phase_out"][row] - alone["phase_out"][0]) < 1e-4


class TestStage:
    def test_speaks_as_the_official_vocoder(
        self, run: Run, family: Family, mel: Tensor, official: Any
    ) -> None:
        outputs = run(make_feed(family, mel))
        assert outputs["sample_count"].tolist() == [[FRAMES * family.mel_hop]]
        official.assert_close("wav", outputs["waveform"], atol=OWN_SOURCE_TOLERANCE, rms=OWN_SOURCE_RMS)
        if "source" in outputs:
            official.assert_close("source", outputs["source"][None], atol=SOURCE_TOLERANCE)

    @pytest.mark.parametrize("family", CACHING, indirect=True, ids=lambda f: f.name)
    def test_continues_a_cached_source(self, run: Run, family: Family, mel: Tensor, official: Any) -> None:
        cache, offset = official["cached_source_in"][0, 0], FRAMES * family.mel_hop
        outputs = run(make_feed(family, mel[:, :, CACHED:], cache=cache, noise_offset=offset))
        assert np.array_equal(outputs["source"][0, : len(cache)], cache)
        official.assert_close("cached.source", outputs["source"][None], atol=SOURCE_TOLERANCE)
        official.assert_close(
            "cached.wav", outputs["waveform"], atol=OWN_SOURCE_TOLERANCE, rms=OWN_SOURCE_RMS
        )

    @pytest.mark.parametrize("family", [COSYVOICE3], indirect=True, ids=lambda f: f.name)
    def test_speaks_an_unfinished_row(self, run: Run, family: Family, mel: Tensor, official: Any) -> None:
        outputs = run(make_feed(family, mel, finalize=False))
        count, official_count = ((FRAMES - held) * family.mel_hop for held in (5, 8))
        assert outputs["sample_count"].tolist() == [[count]]
        head, tail = np.split(outputs["waveform"], [official_count], axis=1)
        official.assert_close("nofinal.wav", head, atol=OWN_SOURCE_TOLERANCE, rms=OWN_SOURCE_RMS)
        assert not tail[:, count - official_count :].any()

    def test_rows_sound_as_they_do_alone(self, run: Run, family: Family, official: Any) -> None:
        rows = unequal_rows(family, official)
        batch = run(make_batch(rows))
        for i, row in enumerate(rows):
            check_row(run(row), batch, i, PAIR_TOLERANCE, OWN_SOURCE_RMS)

    @pytest.mark.parametrize("family", CACHING, indirect=True, ids=lambda f: f.name)
    def test_rows_of_given_source_sound_as_they_do_alone(
        self, run: Run, family: Family, official: Any
    ) -> None:
        # A cache as long as the row is its whole source; what remains is the filter.
        mel, source, hop = torch.from_numpy(official["mel"]), official["source"][0, 0], family.mel_hop
        lengths = (8, 5, 1, 3)
        rows = [
            make_feed(family, mel[:, :, i : i + n], cache=source[i * hop : (i + n) * hop])
            for i, n in enumerate(lengths)
        ]
        batch = run(make_batch(rows))
        for i, row in enumerate(rows):
            alone, count = run(row)["waveform"][0], lengths[i] * hop
            assert largest(batch["waveform"][i, :count] - alone) < 2 * WAVE_TOLERANCE[family.name]
            assert np.array_equal(batch["source"][i, :count], row["source_cache"][0, :count])

    def test_rows_are_exactly_independent(
        self, make: Callable[[], AnyVocoder], family: Family, official: Any
    ) -> None:
        exact, rows = make().double(), unequal_rows(family, official)
        for row in rows:
            row["mel"] = row["mel"].astype(np.float64)
        batch = run_torch(family, exact, make_batch(rows))
        for i, row in enumerate(rows):
            check_row(run_torch(family, exact, row), batch, i, EXACT_TOLERANCE, EXACT_TOLERANCE)

    def test_an_empty_row_harms_nobody(self, run: Run, family: Family, mel: Tensor) -> None:
        row = make_feed(family, mel)
        empty = row | {"frame_count": np.zeros((1, 1), np.int32)}
        outputs = run(make_batch([empty, row]))
        assert outputs["sample_count"][0, 0] == 0
        assert not outputs["waveform"][0].any()
        assert largest(outputs["waveform"][1] - run(row)["waveform"][0]) < PAIR_TOLERANCE


@pytest.mark.parametrize("family", CACHING, indirect=True, ids=lambda f: f.name)
def test_a_second_chunk_continues_the_source(run: Run, family: Family, mel: Tensor) -> None:
    """Two chunks of a held vowel: at the joint the source steps no further than elsewhere."""
    frames, overlap, hop = 30, family.overlap_frames, family.mel_hop
    vowel = mel[:, :, 4:5].repeat(1, 1, frames)  # of a frame that is voiced at the edges of a chunk too
    first = run(make_feed(family, vowel))
    shared = (frames - overlap) * hop
    kept = overlap * hop - (hop // 2 if family is COSYVOICE2 else 0)  # see hift_source
    cache, phase = first["source"][0, shared:][:kept], first["phase_out"][0, 0]

    def step_at_the_joint(phase: float) -> float:
        given = {"cache": cache, "noise_offset": shared, "phase": phase, "phase_frame": overlap - 1}
        source = run(make_feed(family, vowel, **given))["source"][0]
        return abs(float(source[kept] - source[kept - 1]))

    assert step_at_the_joint(phase) < largest(np.diff(first["source"][0, :shared]))
    assert step_at_the_joint(phase) < 0.2 * step_at_the_joint(phase + 0.5)


class TestCheckpoint:
    @pytest.fixture
    def checkpoint(self, family: Family, golden: Callable[[str], Any], tmp_path: Path) -> Checkpoint:
        """A vocoder as adversarial training saves it, with weight norm and a prefix."""
        weights = golden(f"hift_v{family.name[-1]}_weights")
        state = {f"generator.{key}": torch.from_numpy(value) for key, value in weights.items()}
        torch.save(state, tmp_path / "hift.pt")
        return Checkpoint(tmp_path, family, golden_config(family))

    def test_sounds_like_the_official_weights(
        self, checkpoint: Checkpoint, vocoder: AnyVocoder, mel: Tensor, official: Any
    ) -> None:
        given = vocoder_of(checkpoint)
        assert given.state_dict().keys() == vocoder.state_dict().keys()
        frames, source = torch.tensor([[FRAMES]], dtype=torch.int32), torch.from_numpy(official["source"][0])
        with torch.no_grad():
            speech = [v.decode(mel, source, frames) for v in (given, vocoder)]
        assert torch.equal(*speech)
        assert given.m_source.noise.shape[0] > 10 * checkpoint.family.sample_rate
        assert given.m_source.noise.any()

    def test_refuses_other_rates_than_the_family_has(self, checkpoint: Checkpoint) -> None:
        checkpoint.config["hift"]["istft_params"]["hop_len"] = 8
        with pytest.raises(CheckpointError, match="(512|960) samples per mel frame"):
            vocoder_of(checkpoint)

    def test_names_weights_that_do_not_fit(self, checkpoint: Checkpoint) -> None:
        checkpoint.config["hift"]["base_channels"] = 64
        with pytest.raises(CheckpointError, match=r"hift\.pt.*wrong shapes.*instead of"):
            vocoder_of(checkpoint)
