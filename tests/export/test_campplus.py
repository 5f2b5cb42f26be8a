"""CAM++ against the official network, read by structure from ONNX files, in ragged batches and as a stage."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.pipeline import COUNT_16K, SPEAKER, WAVEFORM_16K
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Stage
from cosytriton_ensemble.spec import Tensor as TensorSpec
from cosytriton_export.campplus import CamPPlus, CamPPlusSizes
from cosytriton_export.campplus_reader import read_campplus
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.graph import export_stage
from cosytriton_export.speaker_embedding import SpeakerEmbedding
from cosytriton_export.speech_tokenizer import SpeechTokenizerSizes
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx

if TYPE_CHECKING:
    from tests.conftest import Golden

    from cosytriton_export.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 3e-5  # of embeddings whose largest value is about 9
ROW_TOLERANCE = 2e-5
ONNX_TOLERANCE = 1e-4
AUDIO_TOLERANCE = 2e-4  # the official features are rounded too

STAGE = Stage("speaker_embedding", (WAVEFORM_16K, COUNT_16K), (SPEAKER,), max_batch=8)
GOLDEN_SIZES = CamPPlusSizes(embedding=24, growth=4, bottleneck=8, initial=8)
SHALLOW = CamPPlusSizes(
    growth=4, bottleneck=8, initial=8, head_channels=4, head_blocks=(1, 2), layers=(2, 3, 1)
)


@pytest.fixture(scope="module")
def golden_graph() -> onnx.ModelProto:
    """A tiny CAM++ as the official exporter writes it; stands for a checkpoint's `campplus.onnx`."""
    return onnx.load_from_string(lzma.decompress((GOLDEN / "campplus_tiny.onnx.xz").read_bytes()))


@pytest.fixture(scope="module")
def network(golden_graph: onnx.ModelProto) -> CamPPlus:
    return read_campplus(golden_graph)


@pytest.fixture
def audio(golden: Callable[[str], Golden]) -> Tensor:
    """The recording whose features are the golden input, [1, 20800] at 16 kHz."""
    return torch.from_numpy(golden("frontend")["wav16"])


@pytest.fixture(scope="module")
def shallow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("campplus") / "campplus.onnx"
    write_campplus_onnx(path, SHALLOW, seed=1)
    return path


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def exported(module: SpeakerEmbedding, width: int, folder: Path) -> onnxruntime.InferenceSession:
    stage = replace(STAGE, outputs=(TensorSpec("speaker_embedding", "FP32", (width,)),))
    export_stage(stage, module, folder / "model.onnx")
    return onnxruntime.InferenceSession(folder / "model.onnx")


def run(module: CamPPlus, features: Tensor, frames: Tensor) -> Tensor:
    with torch.inference_mode():
        embedding: Tensor = module(features, frames)
    return embedding


def test_embeddings_are_the_official_ones(network: CamPPlus, golden: Callable[[str], Golden]) -> None:
    tensors = golden("campplus_tiny")
    features = torch.from_numpy(tensors["in"])
    tensors.assert_close("out", run(network, features, counts(features.shape[1])), atol=TOLERANCE)


@pytest.mark.parametrize("frames", [150, 310, 402])
def test_segments_are_the_official_ones(
    network: CamPPlus, golden_graph: onnx.ModelProto, frames: int
) -> None:
    """The official graph itself is the truth for longer recordings, up to three segments."""
    features = torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(frames))
    session = onnxruntime.InferenceSession(golden_graph.SerializeToString())
    (expected,) = session.run(["output"], {"input": features.numpy()})
    np.testing.assert_allclose(run(network, features, counts(frames)).numpy(), expected, atol=TOLERANCE)


def test_sizes_are_read_from_the_graph(network: CamPPlus) -> None:
    wanted = CamPPlus(GOLDEN_SIZES).state_dict()
    assert {key: value.shape for key, value in network.state_dict().items()} == {
        key: value.shape for key, value in wanted.items()
    }


def test_rows_of_unequal_length_do_not_disturb_each_other(network: CamPPlus) -> None:
    lengths = (421, 310, 200, 101, 24)  # over, at and under the borders of the 100-frame segments
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(len(lengths), max(lengths), 80, generator=generator)
    embeddings = run(network, batch, counts(*lengths))
    for row, length in enumerate(lengths):
        alone = run(network, batch[row : row + 1, :length], counts(length))
        torch.testing.assert_close(embeddings[row], alone[0], atol=ROW_TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("frames", [23, 200, 201, 560])
def test_a_written_file_reads_back_as_what_it_computes(shallow_path: Path, frames: int) -> None:
    features = torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(frames))
    session = onnxruntime.InferenceSession(shallow_path)
    (expected,) = session.run(["output"], {"input": features.numpy()})
    module = read_campplus(onnx.load(shallow_path))
    np.testing.assert_allclose(run(module, features, counts(frames)).numpy(), expected, atol=TOLERANCE)


def test_written_files_depend_on_the_seed_alone(tmp_path: Path, shallow_path: Path) -> None:
    for name, seed in (("same", 1), ("other", 2)):
        write_campplus_onnx(tmp_path / name, SHALLOW, seed)
    assert (tmp_path / "same").read_bytes() == shallow_path.read_bytes()
    assert (tmp_path / "other").read_bytes() != shallow_path.read_bytes()


def test_an_untrained_network_still_tells_recordings_apart(shallow_path: Path) -> None:
    module = read_campplus(onnx.load(shallow_path))
    features = torch.randn(2, 300, 80, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [0.5, 2.0]
    ).reshape(2, 1, 1)
    first, second = run(module, features, counts(300, 300))
    assert 0.1 < float(first.std()) < 100
    assert float((first - second).abs().max()) > 0.1


def test_embedding_of_audio_is_the_official_one(
    network: CamPPlus, golden: Callable[[str], Golden], audio: Tensor
) -> None:
    with torch.inference_mode():
        (embedding,) = SpeakerEmbedding(network)(audio, counts(audio.shape[1]))
    golden("campplus_tiny").assert_close("out", embedding, atol=AUDIO_TOLERANCE)


def test_stage_as_onnx_equals_rows_alone(tiny_checkpoint: Checkpoint, tiny_repository: Path) -> None:
    module = SpeakerEmbedding.from_checkpoint(tiny_checkpoint).eval()
    session = onnxruntime.InferenceSession(version_directory(tiny_repository, STAGE.name) / FP32_GRAPH)
    feed = STAGE.sample("opt", batch=3)
    waveforms = torch.from_numpy(feed["waveform_16k"])
    (given,) = session.run(None, feed)
    for row, count in enumerate(feed["sample_count_16k"][:, 0].tolist()):
        with torch.inference_mode():
            (alone,) = module(waveforms[row : row + 1, :count], counts(count))
        np.testing.assert_allclose(given[row], alone[0].numpy(), atol=ONNX_TOLERANCE)
    (empty,) = session.run(None, feed | {"sample_count_16k": np.zeros((3, 1), np.int32)})
    assert np.isfinite(empty).all()


@pytest.mark.full  # its 52 dense layers take the exporter a minute
def test_stage_as_onnx_gives_the_official_embedding(
    tmp_path: Path, network: CamPPlus, golden: Callable[[str], Golden], audio: Tensor
) -> None:
    session = exported(SpeakerEmbedding(network), GOLDEN_SIZES.embedding, tmp_path)
    feed = STAGE.sample("opt", batch=2)
    feed["waveform_16k"][1] = 0.9
    feed["waveform_16k"][1, : audio.shape[1]] = audio[0]
    feed["sample_count_16k"][1] = audio.shape[1]
    (given,) = session.run(None, feed)
    golden("campplus_tiny").assert_close("out", given[1:2], atol=AUDIO_TOLERANCE)


def test_silence_gives_a_finite_embedding(shallow_path: Path) -> None:
    module = SpeakerEmbedding(read_campplus(onnx.load(shallow_path)))
    with torch.inference_mode():
        (embedding,) = module(torch.zeros(1, 16_000), counts(16_000))
    assert embedding.isfinite().all()


class TestForeignGraphs:
    def test_another_network(self, tmp_path: Path) -> None:
        sizes = SpeechTokenizerSizes(width=64, layers=1, inner=64)
        write_speech_tokenizer_onnx(tmp_path / "model.onnx", sizes, seed=0)
        with pytest.raises((ExportError, CheckpointError), match=r"campplus\.onnx"):
            read_campplus(onnx.load(tmp_path / "model.onnx"))

    @pytest.mark.parametrize("kept", [0, 5, 300, 2000])
    def test_a_graph_that_ends_early(self, golden_graph: onnx.ModelProto, kept: int) -> None:
        graph = onnx.ModelProto()
        graph.CopyFrom(golden_graph)
        del graph.graph.node[kept:]
        with pytest.raises((ExportError, CheckpointError), match=r"campplus\.onnx"):
            read_campplus(graph)

    def test_another_stride(self, shallow_path: Path) -> None:
        graph = onnx.load(shallow_path)
        convs = [node for node in graph.graph.node if node.op_type == "Conv"]
        for attribute in convs[0].attribute:
            if attribute.name == "strides":
                attribute.ints[0] = 2
        with pytest.raises(ExportError, match=r"head\.conv1 has the stride 2"):
            read_campplus(graph)

    def test_the_same_weights_in_another_formula(self, shallow_path: Path) -> None:
        graph = onnx.load(shallow_path)
        for node in graph.graph.node:
            if node.op_type == "Sigmoid":
                node.op_type = "Tanh"
        with pytest.raises(ExportError, match="deviates"):
            read_campplus(graph)

    def test_a_missing_segment_mean(self, shallow_path: Path) -> None:
        graph = onnx.load(shallow_path)
        pools = [node for node in graph.graph.node if node.op_type == "AveragePool"]
        for attribute in pools[0].attribute:
            if attribute.name == "kernel_shape":
                attribute.ints[0] = 50
        with pytest.raises(ExportError, match="segment means"):
            read_campplus(graph)
