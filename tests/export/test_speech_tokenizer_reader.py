"""Speech tokenizers read by structure from ONNX files that are written as the official ones are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from cosytriton_export.campplus import CamPPlusSizes
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.speech_tokenizer import SpeechTokenizer, SpeechTokenizerSizes, Version
from cosytriton_export.speech_tokenizer_reader import (
    DECISION_MARGIN,
    read_speech_tokenizer,
    source_name,
)
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx

VERSIONS: tuple[Version, ...] = (1, 2, 3)
SIZES = {
    version: SpeechTokenizerSizes(
        version=version,
        width=128,
        layers=3 if version == 3 else 2,
        inner=192,
        attention_epsilon=1e-6,
        codewords=300,
    )
    for version in VERSIONS
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written tokenizers of all versions under their official names."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for version in VERSIONS:
        write_speech_tokenizer_onnx(folder / source_name(version), SIZES[version], seed=1)
    return folder


@pytest.fixture(params=VERSIONS, ids="version {}".format)
def version(request: pytest.FixtureRequest) -> Version:
    chosen: Version = request.param
    return chosen


@pytest.fixture
def graph(folder: Path, version: Version) -> onnx.ModelProto:
    return onnx.load(folder / source_name(version))


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def speechlike(frames: int) -> Tensor:
    """Smooth random log-mel features [1, 128, frames]."""
    noise = torch.randn(1, 128, frames + 8, generator=torch.Generator().manual_seed(frames))
    return torch.nn.functional.avg_pool1d(noise, 9, 1) * 2 - 0.4


def assert_same_tokens(module: SpeechTokenizer, features: Tensor, expected: list[int]) -> None:
    """Compare with `expected` where no other token is as good as equal."""
    frames = counts(features.shape[2])
    with torch.inference_mode():
        tokens, _ = module(features, frames)
        certain = module.quantizer.margin(module.encoder(features, frames)[0])[0] > DECISION_MARGIN / 10
    assert certain.float().mean() > 0.8
    assert len(set(expected)) > len(expected) // 10
    assert tokens[0][certain].tolist() == torch.tensor(expected)[certain].tolist()


@pytest.mark.parametrize("frames", [25, 130, 402])
def test_a_written_file_reads_back_as_what_it_computes(
    folder: Path, graph: onnx.ModelProto, version: Version, frames: int
) -> None:
    features = speechlike(frames)
    session = onnxruntime.InferenceSession(folder / source_name(version))
    feed = {"feats": features.numpy(), "feats_length": np.array([frames], np.int32)}
    (expected,) = session.run(["indices"], feed)
    assert_same_tokens(read_speech_tokenizer(graph, version), features, expected[0].tolist())


def test_depth_and_epsilons_are_the_graphs(graph: onnx.ModelProto, version: Version) -> None:
    module = read_speech_tokenizer(graph, version)
    blocks = list(module.encoder.blocks)
    assert len(blocks) == SIZES[version].layers
    for block in blocks:
        assert block.get_submodule("attn_ln").eps == pytest.approx(1e-6)
        assert block.get_submodule("mlp_ln").eps == pytest.approx(1e-5)


def test_layer_norms_are_written_as_in_the_official_files(graph: onnx.ModelProto, version: Version) -> None:
    assert any(node.op_type == "LayerNormalization" for node in graph.graph.node) == (version == 2)


def test_projections_are_told_apart_in_any_order(graph: onnx.ModelProto, version: Version) -> None:
    wanted = read_speech_tokenizer(graph, version).state_dict()
    nodes = list(graph.graph.node)
    query, value = (
        next(i for i, node in enumerate(nodes) if node.name.endswith(f"blocks.0/attn/{name}/MatMul"))
        for name in ("query", "value")
    )
    first, second = sorted((query, value))
    nodes.insert(first, nodes.pop(second))  # both take the normalised input alone
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    given = read_speech_tokenizer(graph, version).state_dict()
    assert all(torch.equal(given[key], wanted[key]) for key in wanted)


def test_written_files_depend_on_the_seed_alone(tmp_path: Path, folder: Path, version: Version) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_speech_tokenizer_onnx(tmp_path / name, SIZES[version], seed)
    written = (folder / source_name(version)).read_bytes()
    assert (tmp_path / "same").read_bytes() == written
    assert (tmp_path / "other").read_bytes() != written


class TestOtherFamilies:
    @pytest.mark.parametrize(
        ("given", "wanted", "message"),
        [
            (1, 2, r"speech_tokenizer_v2\.onnx holds .* codebook, as CosyVoice 1 has"),
            (1, 3, r"speech_tokenizer_v3\.onnx holds .* codebook, as CosyVoice 1 has"),
            (2, 1, r"speech_tokenizer_v1\.onnx holds .* scalar quantisation, as CosyVoice 2 and 3"),
            (3, 1, r"speech_tokenizer_v1\.onnx holds .* scalar quantisation, as CosyVoice 2 and 3"),
        ],
    )
    def test_their_tokens_are_refused(
        self, folder: Path, given: Version, wanted: Version, message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_speech_tokenizer(onnx.load(folder / source_name(given)), wanted)

    @pytest.mark.parametrize(("given", "wanted"), [(2, 3), (3, 2)])
    def test_another_depth_is_none(self, folder: Path, given: Version, wanted: Version) -> None:
        module = read_speech_tokenizer(onnx.load(folder / source_name(given)), wanted)
        assert len(module.encoder.blocks) == SIZES[given].layers


class TestForeignGraphs:
    @pytest.mark.parametrize(("version", "message"), [(1, "0 pairs"), (2, "0 FSMN"), (3, "0 FSMN")])
    def test_another_network(self, tmp_path: Path, version: Version, message: str) -> None:
        sizes = CamPPlusSizes(
            growth=2, bottleneck=4, initial=4, head_channels=2, head_blocks=(1, 1), layers=(1, 1, 1)
        )
        write_campplus_onnx(tmp_path / "model.onnx", sizes, seed=0)
        with pytest.raises(ExportError, match=message):
            read_speech_tokenizer(onnx.load(tmp_path / "model.onnx"), version)

    @pytest.mark.parametrize("kept", [0, 20, 150])
    def test_a_graph_that_ends_early(self, graph: onnx.ModelProto, version: Version, kept: int) -> None:
        del graph.graph.node[kept:]
        with pytest.raises((ExportError, CheckpointError), match=source_name(version)):
            read_speech_tokenizer(graph, version)

    def test_another_token_rate(self, graph: onnx.ModelProto, version: Version) -> None:
        first = next(node for node in graph.graph.node if node.op_type == "Conv")
        set_first(first, "strides", 2 if version == 1 else 1)
        with pytest.raises(ExportError, match="strides"):
            read_speech_tokenizer(graph, version)

    def test_too_few_positions(self, tmp_path: Path) -> None:
        sizes = SpeechTokenizerSizes(version=1, width=64, layers=1, inner=64, positions=500, codewords=10)
        write_speech_tokenizer_onnx(tmp_path / "model.onnx", sizes, seed=0)
        with pytest.raises(ExportError, match="500 rows, at least 1500"):
            read_speech_tokenizer(onnx.load(tmp_path / "model.onnx"), 1)

    @pytest.mark.parametrize(
        ("version", "old", "new"),
        [
            (1, "Softmax", "LogSoftmax"),
            (1, "ArgMax", "ArgMin"),
            (2, "Softmax", "LogSoftmax"),
            (2, "Tanh", "Sigmoid"),
            (3, "Erf", "Tanh"),
        ],
    )
    def test_a_changed_formula(self, folder: Path, version: Version, old: str, new: str) -> None:
        graph = onnx.load(folder / source_name(version))
        for node in graph.graph.node:
            if node.op_type == old:
                node.op_type = new
        with pytest.raises(ExportError, match="other tokens"):
            read_speech_tokenizer(graph, version)


def set_first(node: onnx.NodeProto, name: str, value: int) -> None:
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.ints[0] = value
