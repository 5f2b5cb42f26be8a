"""The stage from a recording to speech tokens, for each family, in PyTorch and as ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.pipeline import COUNT_16K, WAVEFORM_16K
from cosytriton_ensemble.spec import Dim, Stage
from cosytriton_ensemble.spec import Tensor as TensorSpec
from cosytriton_export.audio_tokenizer import AudioTokenizer
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.features import FEATURE_RATE
from cosytriton_export.graph import export_stage
from cosytriton_export.speech_tokenizer import SpeechTokenizer, SpeechTokenizerSizes, Version
from cosytriton_export.voice_models_writer import write_speech_tokenizer_onnx
from cosytriton_export.weights import load_weights

if TYPE_CHECKING:
    from tests.conftest import Golden

OFFICIAL = {
    "s3tok_v1_50hz_tiny": SpeechTokenizerSizes(
        version=1, width=64, layers=2, inner=256, head_width=32, positions=1500, codewords=128
    ),
    "s3tok_v3_25hz_tiny": SpeechTokenizerSizes(version=3, width=64, layers=2, inner=256),
}


@dataclass
class Official:
    """The stage with official weights, the official tokens of `audio`, and how many a second has."""

    module: AudioTokenizer
    tokens: list[int]
    rate: int


@pytest.fixture
def audio(golden: Callable[[str], Golden]) -> Tensor:
    return torch.from_numpy(golden("frontend")["wav16"])


@pytest.fixture(params=OFFICIAL)
def official(request: pytest.FixtureRequest, golden: Callable[[str], Golden]) -> Official:
    tensors = golden(request.param)
    module = SpeechTokenizer(OFFICIAL[request.param]).eval()
    weights = {k.removeprefix("w."): torch.from_numpy(v) for k, v in tensors.items() if k.startswith("w.")}
    if "encoder.positional_embedding" in weights:  # for the longest recording; the tiny file has 300
        weights["encoder.positional_embedding"] = module.encoder.positional_embedding
    load_weights(module, weights, "golden")
    rate = FEATURE_RATE // OFFICIAL[request.param].frames_per_token
    return Official(AudioTokenizer(module), tensors["codes"][0].tolist(), rate)


def checkpoint(family: Family, graph: onnx.ModelProto) -> Checkpoint:
    """What the stage asks of a checkpoint."""
    return cast(Checkpoint, SimpleNamespace(family=family, onnx=lambda _: graph))


def written(path: Path, version: Version) -> onnx.ModelProto:
    sizes = SpeechTokenizerSizes(version=version, width=128, layers=2, inner=192)
    write_speech_tokenizer_onnx(path, sizes, seed=0)
    return onnx.load(path)


def run(module: AudioTokenizer, waveform: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        tokens, count = module(waveform, torch.tensor([[waveform.shape[1]]], dtype=torch.int32))
    return tokens, count


def stage(tokens_per_second: int) -> Stage:
    tokens = Dim("prompt_tokens", 1, 5 * tokens_per_second, 30 * tokens_per_second)
    outputs = (TensorSpec("tokens", "INT32", (tokens,)), TensorSpec("token_count", "INT32", (1,)))
    return Stage("audio_tokenizer", (WAVEFORM_16K, COUNT_16K), outputs, max_batch=8)


def test_tokens_from_audio_are_the_official_ones(official: Official, audio: Tensor) -> None:
    tokens, count = run(official.module, audio)
    assert tokens[0].tolist() == official.tokens
    assert int(count) == len(official.tokens)


def test_stage_as_onnx(tmp_path: Path, official: Official, audio: Tensor) -> None:
    declared, rate, valid = stage(official.rate), official.rate, len(official.tokens)
    export_stage(declared, official.module, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feed = declared.sample("opt", batch=3)
    feed["waveform_16k"][1] = 0.9
    feed["waveform_16k"][1, : audio.shape[1]] = audio[0]
    feed["sample_count_16k"][1] = audio.shape[1]
    tokens, count = session.run(None, feed)
    assert tokens.shape == (3, 5 * rate)
    assert count[:2, 0].tolist() == [5 * rate, valid]
    assert tokens[1, :valid].tolist() == official.tokens
    assert not tokens[1, valid:].any()
    empty, none = session.run(None, feed | {"sample_count_16k": np.zeros((3, 1), np.int32)})
    assert not none.any()
    assert not empty.any()
    tokens, count = session.run(None, declared.sample("max"))
    assert tokens.shape == (1, 30 * rate)
    assert int(count[0, 0]) == 30 * rate


@pytest.mark.parametrize(
    ("family", "version"),
    [(COSYVOICE1, 1), (COSYVOICE2, 2), (COSYVOICE3, 3)],
    ids=lambda value: str(value)[:24],
)
def test_each_family_has_its_rate_and_codes(
    tmp_path: Path, family: Family, version: Version, audio: Tensor
) -> None:
    module = AudioTokenizer.from_checkpoint(checkpoint(family, written(tmp_path / "model.onnx", version)))
    tokens, count = run(module, audio)
    assert int(count) == tokens.shape[1] == -(-family.token_rate * audio.shape[1] // 16_000)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < family.speech_codes
    assert len(set(tokens[0].tolist())) > tokens.shape[1] // 4  # untrained, and yet it tells sounds apart


@pytest.mark.parametrize(
    ("family", "version", "file"),
    [
        (COSYVOICE1, 2, "speech_tokenizer_v1.onnx"),
        (COSYVOICE2, 1, "speech_tokenizer_v2.onnx"),
        (COSYVOICE3, 1, "speech_tokenizer_v3.onnx"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_another_familys_file_is_refused(tmp_path: Path, family: Family, version: Version, file: str) -> None:
    with pytest.raises(CheckpointError, match=file):
        AudioTokenizer.from_checkpoint(checkpoint(family, written(tmp_path / "model.onnx", version)))
