"""The checkpoint writer: official keys and shapes at both sizes, and weights that can be heard."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cosytriton_ensemble.language_model import LanguageModel
from cosytriton_ensemble.pipeline import COSYVOICE2
from cosytriton_ensemble.sampling import seeded_uniform
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import ExportError
from cosytriton_export.exporter import MODULES
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.parity import stage_reference
from cosytriton_export.shapes import Shapes, flow_shapes, hift_shapes, llm_shapes
from cosytriton_export.template import SIZES, YAML
from cosytriton_export.writer import qwen_config, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"

# Of the official CosyVoice2-0.5B files: number of keys, number of weights, and some shapes.
OFFICIAL: dict[str, tuple[int, int, Shapes]] = {
    "llm": (
        295,
        641_938_468,
        {
            "llm.model.model.embed_tokens.weight": (151_936, 896),
            "llm.model.model.layers.23.self_attn.k_proj.weight": (128, 896),
            "llm.model.model.layers.0.mlp.down_proj.weight": (896, 4864),
            "llm_decoder.bias": (6564,),
        },
    ),
    "flow": (
        1121,
        112_549_360,
        {
            "encoder.encoders.5.self_attn.pos_bias_u": (8, 64),
            "encoder.pre_lookahead_layer.conv1.weight": (512, 512, 4),
            "decoder.estimator.down_blocks.0.0.res_conv.weight": (256, 320, 1),
            "decoder.estimator.mid_blocks.11.1.3.attn1.to_q.weight": (512, 256),
            "decoder.estimator.up_blocks.0.0.block1.block.0.weight": (256, 512, 3),
        },
    ),
    "hift": (
        328,
        20_821_295,
        {
            "ups.0.parametrizations.weight.original0": (512, 1, 1),
            "ups.0.parametrizations.weight.original1": (512, 256, 16),
            "source_downs.1.weight": (128, 18, 6),
            "resblocks.8.convs2.2.parametrizations.weight.original1": (64, 64, 11),
            "f0_predictor.condnet.8.parametrizations.weight.original1": (512, 512, 3),
        },
    ),
}


def shapes(name: str, config: Config, qwen: dict[str, object]) -> Shapes:
    return {
        "llm": lambda: llm_shapes(config, qwen),
        "flow": lambda: flow_shapes(config),
        "hift": lambda: hift_shapes(config),
    }[name]()


@pytest.mark.parametrize("name", OFFICIAL)
def test_full_size_has_the_official_keys_and_shapes(tmp_path: Path, name: str) -> None:
    (tmp_path / "full.yaml").write_text(YAML.format(**vars(SIZES["full"])))
    given = shapes(name, load_hyperyaml(tmp_path / "full.yaml"), qwen_config(SIZES["full"]))
    keys, weights, some = OFFICIAL[name]
    assert len(given) == keys
    assert sum(map(math.prod, given.values())) == weights
    assert {key: given[key] for key in some} == some


@pytest.mark.parametrize("name", ["flow", "hift"])
def test_shapes_follow_from_the_configuration_like_the_official_modules(
    golden: Callable[[str], Feed], name: str
) -> None:
    """The golden weights are complete official state dicts of other sizes."""
    given = shapes(name, load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml"), {})
    assert given == {key: value.shape for key, value in golden(f"{name}_v2_weights").items()}


def test_a_written_file_has_exactly_the_shapes_and_shares_the_tied_embedding(
    tiny_checkpoint: Checkpoint,
) -> None:
    for name in OFFICIAL:
        state = torch.load(tiny_checkpoint.path / f"{name}.pt", weights_only=True)
        wanted = shapes(name, tiny_checkpoint.config, dict(tiny_checkpoint.qwen_config))
        assert {key: tuple(value.shape) for key, value in state.items()} == wanted
        if name == "llm":
            tied = [state[f"llm.model.{key}.weight"] for key in ("lm_head", "model.embed_tokens")]
            assert tied[0].data_ptr() == tied[1].data_ptr()


def test_a_seed_gives_the_same_checkpoint_and_another_seed_another(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    same = write_checkpoint(tmp_path / "same", "tiny", seed=0).state("flow")
    other = write_checkpoint(tmp_path / "other", "tiny", seed=1).state("flow")
    wanted = tiny_checkpoint.state("flow")
    assert all(torch.equal(same[key], wanted[key]) for key in wanted)
    assert not torch.equal(other["encoder_proj.weight"], wanted["encoder_proj.weight"])


def test_an_existing_directory_is_never_written_to(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists already"):
        write_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_its_speech_is_finite_audible_and_not_clipped(tiny_checkpoint: Checkpoint) -> None:
    rng, count = np.random.default_rng(0), 50
    speaker = rng.normal(0, 1, (1, 192)).astype(np.float32)
    feed = {
        "tokens": rng.integers(0, COSYVOICE2.speech_codes, (1, count)).astype(np.int32),
        "token_count": np.array([[count]], np.int32),
        "prompt_tokens": np.zeros((1, 25), np.int32),
        "prompt_token_count": np.array([[0]], np.int32),
        "prompt_mel": np.zeros((1, 50, 80), np.float32),
        "speaker_embedding": speaker,
        "streaming": np.array([[False]]),
        "finalize": np.array([[True]]),
    }
    mel, frames = _run("flow", tiny_checkpoint, feed)
    feed = {
        "mel": mel,
        "frame_count": frames,
        "source_cache": np.zeros((1, COSYVOICE2.overlap_samples), np.float32),
        "source_cache_count": np.array([[0]], np.int32),
        "noise_offset": np.array([[0]], np.int32),
    }
    waveform, _, samples = _run("vocoder", tiny_checkpoint, feed)
    assert samples.item() == waveform.size == count * COSYVOICE2.samples_per_token
    assert np.isfinite(waveform).all()
    assert 0.01 < np.sqrt(np.mean(waveform**2)) < 0.5
    assert np.mean(np.abs(waveform) > 0.98) < 0.05


def _run(stage: str, checkpoint: Checkpoint, feed: Feed) -> list[Array]:
    declared, build = MODULES[stage]
    return list(stage_reference(declared, build(checkpoint).eval())(feed))


def test_its_language_model_ends_by_itself(tiny_repository: Path) -> None:
    """Most utterances end between the least and the largest allowed length (2 and 20 per text token)."""
    model = LanguageModel.open(tiny_repository / "speech_lm" / "1" / "model.onnx", threads=1)
    text, lengths = 10, []
    for seed in range(8):
        uniform, rng = seeded_uniform(seed), np.random.default_rng(seed)
        logits = model.join(model.spec.prompt(rng.integers(0, 256, text).tolist(), [])).ravel()
        spoken: list[int] = []
        while len(spoken) < 20 * text:
            logits = logits.copy()
            if len(spoken) < 2 * text:
                logits[model.spec.eos_id] = -np.inf
            token = model.spec.sampler.sample(logits, spoken, uniform)
            if token in model.spec.stop_ids:
                break
            spoken.append(token)
            logits = model.step([model.spec.speech_offset + token]).ravel()
        model.leave(0)
        lengths.append(len(spoken))
    assert np.mean(np.array(lengths) < 20 * text) > 0.5, lengths
    assert max(lengths) > 2 * text, lengths
