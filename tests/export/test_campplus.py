"""CAM++ against the official network, read by structure from ONNX files, in ragged batches and as a stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosytriton_ensemble.pipeline import SPEAKER_EMBEDDING
from cosytriton_export.campplus import CamPPlus, CamPPlusSizes
from cosytriton_export.campplus_reader import read_campplus
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.graph import export_stage
from cosytriton_export.speaker_embedding import SpeakerEmbedding
from cosytriton_export.speech_tokenizer import SpeechTokenizerSizes
from cosytriton_export.voice_models_writer import write_campplus_onnx, write_speech_tokenizer_onnx
from cosytriton_export.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 3e-5  # of embeddings whose largest value is about 9
ROW_TOLERANCE = 2e-5
ONNX_TOLERANCE = 1e-4

GOLDEN_SIZES = CamPPlusSizes(embedding=24, growth=4, bottleneck=8, initial=8)
SHALLOW = CamPPlusSizes(
    growth=4, bottleneck=8, initial=8, head_channels=4, head_blocks=(1, 2), layers=(2, 3, 1)
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "campplus_tiny.safetensors")


@pytest.fixture(scope="module")
def golden_graph() -> onnx.ModelProto:
    return onnx.load(GOLDEN / "campplus_tiny.onnx")


@pytest.fixture(scope="module")
def shallow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("campplus") / "campplus.onnx"
    write_campplus_onnx(path, SHALLOW, seed=1)
    return path


@pytest.fixture(scope="module")
def official(golden: dict[str, Tensor]) -> CamPPlus:
    """The module with weights under the official keys."""
    module = CamPPlus(GOLDEN_SIZES).eval()
    counters = {k: v for k, v in module.state_dict().items() if k.endswith("num_batches_tracked")}
    weights = {k.removeprefix("w."): v for k, v in golden.items() if k.startswith("w.")}
    load_weights(module, weights | counters, "golden")
    return module


@pytest.fixture(params=["official keys", "campplus.onnx"])
def network(request: pytest.FixtureRequest, official: CamPPlus, golden_graph: onnx.ModelProto) -> CamPPlus:
    return official if request.param == "official keys" else read_campplus(golden_graph)


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


def run(module: CamPPlus, features: Tensor, frames: Tensor) -> Tensor:
    with torch.inference_mode():
        embedding: Tensor = module(features, frames)
    return embedding


@pytest.mark.parametrize("case", ["", "_long"])
def test_embeddings_are_the_official_ones(network: CamPPlus, golden: dict[str, Tensor], case: str) -> None:
    features = golden[f"in{case}"]
    embedding = run(network, features, counts(features.shape[1]))
    torch.testing.assert_close(embedding, golden[f"out{case}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("head", "head"),
        ("xvector.tdnn", "tdnn"),
        ("xvector.block1", "block1"),
        ("xvector.transit1", "transit1"),
    ],
)
def test_inner_layers_are_the_official_ones(
    official: CamPPlus, golden: dict[str, Tensor], layer: str, name: str
) -> None:
    outputs: list[Tensor] = []
    hook = official.get_submodule(layer).register_forward_hook(lambda *call: outputs.append(call[-1]))
    run(official, golden["in"], counts(golden["in"].shape[1]))
    hook.remove()
    expected = golden[f"mid.{name}"]
    torch.testing.assert_close(outputs[0][:, :, : expected.shape[2]], expected, atol=TOLERANCE, rtol=0)


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


def test_stage_from_audio_to_embedding_as_onnx(tmp_path: Path, shallow_path: Path) -> None:
    module = SpeakerEmbedding(read_campplus(onnx.load(shallow_path)))
    export_stage(SPEAKER_EMBEDDING, module, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feed = SPEAKER_EMBEDDING.sample("opt", batch=3)
    waveforms = torch.from_numpy(feed["waveform_16k"])
    (given,) = session.run(None, feed)
    for row, count in enumerate(feed["sample_count_16k"][:, 0].tolist()):
        with torch.inference_mode():
            (alone,) = module(waveforms[row : row + 1, :count], counts(count))
        np.testing.assert_allclose(given[row], alone[0].numpy(), atol=ONNX_TOLERANCE)
    (empty,) = session.run(None, feed | {"sample_count_16k": np.zeros((3, 1), np.int32)})
    assert np.isfinite(empty).all()


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
