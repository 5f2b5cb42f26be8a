"""The speech tokenizer against the official one, read from ONNX, in ragged batches and as a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosytriton_ensemble.pipeline import AUDIO_TOKENIZER
from cosytriton_export import voice_models_writer
from cosytriton_export.audio_tokenizer import AudioTokenizer
from cosytriton_export.campplus import CamPPlusSizes
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.graph import export_stage
from cosytriton_export.speech_tokenizer import SpeechTokenizer, SpeechTokenizerSizes
from cosytriton_export.speech_tokenizer_reader import read_speech_tokenizer
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx
from cosytriton_export.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 2e-5  # of hidden states and projections; token ids are exact

GOLDEN_SIZES = SpeechTokenizerSizes(width=64, layers=2, inner=256)
TWO_HEADS = SpeechTokenizerSizes(
    width=128, layers=2, inner=192, attention_epsilon=1e-6, feed_forward_epsilon=1e-5
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "s3tok_v2_25hz_tiny.safetensors")


@pytest.fixture(scope="module")
def golden_features() -> Tensor:
    return load_file(GOLDEN / "frontend.safetensors")["whisper_logmel128"]


@pytest.fixture(scope="module")
def golden_audio() -> Tensor:
    return load_file(GOLDEN / "frontend.safetensors")["wav16"]


@pytest.fixture(scope="module")
def official(golden: dict[str, Tensor]) -> SpeechTokenizer:
    """The module with weights under the official keys."""
    module = SpeechTokenizer(GOLDEN_SIZES).eval()
    weights = {key.removeprefix("w."): value for key, value in golden.items() if key.startswith("w.")}
    load_weights(module, weights, "golden")
    return module


@pytest.fixture(scope="module")
def written_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "speech_tokenizer_v2.onnx"
    write_speech_tokenizer_onnx(path, TWO_HEADS, seed=1)
    return path


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def run(module: SpeechTokenizer | AudioTokenizer, data: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        tokens, count = module(data, lengths)
    return tokens, count


def speechlike(frames: int, seed: int) -> Tensor:
    """Smooth random log-mel features [1, 128, frames]."""
    noise = torch.randn(1, 128, frames + 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool1d(noise, 9, 1) * 2 - 0.4


def test_tokens_are_the_official_ones(
    official: SpeechTokenizer, golden: dict[str, Tensor], golden_features: Tensor
) -> None:
    frames = counts(golden_features.shape[2])
    tokens, count = run(official, golden_features, frames)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == golden["codes"].tolist()
    assert count.tolist() == [golden["hidden_len"].tolist()]
    with torch.inference_mode():
        hidden, _ = official.encoder(golden_features, frames)
        projected = official.quantizer.get_submodule("_codebook.project_down")(hidden)
    torch.testing.assert_close(hidden, golden["hidden"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(projected, golden["fsq_pre_tanh"], atol=TOLERANCE, rtol=0)


def test_tokens_from_audio_are_the_official_ones(
    official: SpeechTokenizer, golden: dict[str, Tensor], golden_audio: Tensor
) -> None:
    tokens, _ = run(AudioTokenizer(official), golden_audio, counts(golden_audio.shape[1]))
    assert tokens.tolist() == golden["codes"].tolist()


def test_rows_of_unequal_length_do_not_disturb_each_other(official: SpeechTokenizer) -> None:
    lengths = (203, 130, 97, 40, 5)
    batch = torch.full((len(lengths), 128, max(lengths)), 3.0)  # loud padding
    for row, length in enumerate(lengths):
        batch[row, :, :length] = speechlike(length, seed=row)
    tokens, count = run(official, batch, counts(*lengths))
    assert count[:, 0].tolist() == [-(-length // 4) for length in lengths]
    for row, length in enumerate(lengths):
        alone, _ = run(official, batch[row : row + 1, :, :length], counts(length))
        valid = int(count[row])
        assert tokens[row, :valid].tolist() == alone[0].tolist()
        assert not tokens[row, valid:].any()


@pytest.mark.parametrize("frames", [25, 130, 402])
@pytest.mark.parametrize("opset", [17, 16])
def test_a_written_file_reads_back_as_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int, frames: int
) -> None:
    # Opset 16 has no layer norm: it is then written as its arithmetic.
    monkeypatch.setattr(voice_models_writer, "_OPSET", opset)
    write_speech_tokenizer_onnx(tmp_path / "model.onnx", TWO_HEADS, seed=2)
    graph = onnx.load(tmp_path / "model.onnx")
    assert any(node.op_type == "LayerNormalization" for node in graph.graph.node) == (opset == 17)
    features = speechlike(frames, seed=frames)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feed = {"feats": features.numpy(), "feats_length": np.array([frames], np.int32)}
    (expected,) = session.run(["indices"], feed)
    module = read_speech_tokenizer(graph)
    tokens, _ = run(module, features, counts(frames))
    assert tokens.tolist() == expected.tolist()
    block = module.encoder.get_submodule("blocks.1")
    assert block.get_submodule("attn_ln").eps == pytest.approx(TWO_HEADS.attention_epsilon)
    assert block.get_submodule("mlp_ln").eps == pytest.approx(TWO_HEADS.feed_forward_epsilon)


def test_projections_are_told_apart_in_any_order(written_path: Path, golden_features: Tensor) -> None:
    wanted, _ = run(read_speech_tokenizer(onnx.load(written_path)), golden_features, counts(130))
    graph = onnx.load(written_path)
    nodes = list(graph.graph.node)
    start = next(i for i, node in enumerate(nodes) if node.name.endswith("attn/query/MatMul"))
    value = next(i for i, node in enumerate(nodes) if node.name.endswith("attn/value/MatMul"))
    nodes.insert(start, nodes.pop(value))
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    tokens, _ = run(read_speech_tokenizer(graph), golden_features, counts(130))
    assert tokens.tolist() == wanted.tolist()


def test_written_files_depend_on_the_seed_alone(tmp_path: Path, written_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_speech_tokenizer_onnx(tmp_path / name, TWO_HEADS, seed)
    assert (tmp_path / "same").read_bytes() == written_path.read_bytes()
    assert (tmp_path / "other").read_bytes() != written_path.read_bytes()


def test_an_untrained_tokenizer_still_gives_various_tokens(written_path: Path, golden_audio: Tensor) -> None:
    module = AudioTokenizer(read_speech_tokenizer(onnx.load(written_path)))
    tokens, _ = run(module, golden_audio, counts(golden_audio.shape[1]))
    assert len(set(tokens[0].tolist())) > tokens.shape[1] // 4


def test_stage_from_audio_to_tokens_as_onnx(
    tmp_path: Path, official: SpeechTokenizer, golden: dict[str, Tensor], golden_audio: Tensor
) -> None:
    module = AudioTokenizer(official)
    export_stage(AUDIO_TOKENIZER, module, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feed = AUDIO_TOKENIZER.sample("opt", batch=3)
    samples = golden_audio.shape[1]
    feed["waveform_16k"][1] = 0.9
    feed["waveform_16k"][1, :samples] = golden_audio[0]
    feed["sample_count_16k"][1] = samples
    tokens, count = session.run(None, feed)
    assert tokens.shape == (3, 125)
    assert count[0] == 125
    assert tokens[1, : int(count[1, 0])].tolist() == golden["codes"][0].tolist()
    assert not tokens[1, int(count[1, 0]) :].any()
    longest = AUDIO_TOKENIZER.sample("max")
    tokens, count = session.run(None, longest)
    assert tokens.shape == (1, 750)
    assert int(count[0, 0]) == 750
    empty, none = session.run(None, feed | {"sample_count_16k": np.zeros((3, 1), np.int32)})
    assert not none.any()
    assert not empty.any()


class TestForeignGraphs:
    def test_another_network(self, tmp_path: Path) -> None:
        sizes = CamPPlusSizes(
            growth=2, bottleneck=4, initial=4, head_channels=2, head_blocks=(1, 1), layers=(1, 1, 1)
        )
        write_campplus_onnx(tmp_path / "model.onnx", sizes, seed=0)
        with pytest.raises(ExportError, match="0 FSMN memory blocks"):
            read_speech_tokenizer(onnx.load(tmp_path / "model.onnx"))

    @pytest.mark.parametrize("kept", [0, 20, 150])
    def test_a_graph_that_ends_early(self, written_path: Path, kept: int) -> None:
        graph = onnx.load(written_path)
        del graph.graph.node[kept:]
        with pytest.raises((ExportError, CheckpointError), match=r"speech_tokenizer_v2\.onnx"):
            read_speech_tokenizer(graph)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda node: set_first(node, "strides", 1), "strides"),
            (lambda node: replace_kind(node, "Softmax", "LogSoftmax"), "other tokens"),
            (lambda node: replace_kind(node, "Tanh", "Sigmoid"), "other tokens"),
        ],
    )
    def test_a_changed_formula(
        self, written_path: Path, change: Callable[[onnx.NodeProto], None], message: str
    ) -> None:
        graph = onnx.load(written_path)
        for node in graph.graph.node:
            change(node)
        with pytest.raises(ExportError, match=message):
            read_speech_tokenizer(graph)


def set_first(node: onnx.NodeProto, name: str, value: int) -> None:
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.ints[0] = value


def replace_kind(node: onnx.NodeProto, old: str, new: str) -> None:
    if node.op_type == old:
        node.op_type = new
