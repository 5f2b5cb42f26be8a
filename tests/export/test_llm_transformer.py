"""CosyVoice 1's text encoder against the official one, as PyTorch module and as ONNX graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.errors import CheckpointError
from cosytriton_export.graph import save_model
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.llm_graph import text_encoder_model
from cosytriton_export.llm_transformer import PromptEncoder, TransformerLM

Array = npt.NDArray[Any]
Run = Callable[[Array, Array], list[Array]]

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def config() -> Config:
    loaded: Config = load_hyperyaml(GOLDEN / COSYVOICE1.config_file.replace(".", "_tiny."))["llm"]
    return loaded


@pytest.fixture(scope="module")
def state(golden: Callable[[str], Any]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in golden("llm_v1_weights").items()}


@pytest.fixture(scope="module")
def model(config: Config, state: dict[str, torch.Tensor]) -> TransformerLM:
    return TransformerLM.from_state(config, state, "llm.pt").requires_grad_(False)


@pytest.fixture(scope="module", params=["torch", "onnx"])
def encode(
    request: pytest.FixtureRequest, model: TransformerLM, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    if request.param == "torch":
        encoder = PromptEncoder(model)
        return lambda *inputs: [output.numpy() for output in encoder(*map(torch.from_numpy, inputs))]
    path = tmp_path_factory.mktemp("text_encoder") / "model.onnx"
    save_model(text_encoder_model(model), path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {tensor.name: tensor.shape for tensor in session.get_inputs()} == {
        "text_ids": ["batch", "new"],
        "speaker_embedding": ["batch", 192],
    }
    names = ["text_embeddings", "speaker"]
    return lambda *inputs: session.run(
        names, dict(zip(("text_ids", "speaker_embedding"), inputs, strict=True))
    )


@pytest.fixture(scope="module")
def official(golden: Callable[[str], Any]) -> Any:
    return golden("llm_v1")


@pytest.fixture(scope="module")
def text(official: Any) -> Array:
    return np.concatenate([official["prompt_text"], official["text"]], 1)


def test_text_and_speaker_match_the_official_ones(encode: Run, official: Any, text: Array) -> None:
    embeddings, speaker = encode(text, official["embedding"])
    official.assert_close("text_encoder_affine", embeddings, atol=TOLERANCE)
    np.testing.assert_allclose(speaker[:, 0], official["lm_input"][:, 1], rtol=0, atol=TOLERANCE)


def test_states_before_the_affine_layer_match_the_official_ones(
    model: TransformerLM, official: Any, text: Array
) -> None:
    embedded, causal = model.text_embedding(torch.from_numpy(text)), torch.full((15, 15), -torch.inf).triu(1)
    official.assert_close("text_encoder_out", model.text_encoder(embedded, causal), atol=TOLERANCE)


def test_text_hears_only_what_stands_before_it(encode: Run, official: Any, text: Array) -> None:
    whole, _ = encode(text, official["embedding"])
    for count in (1, 4):
        begun, _ = encode(text[:, :count], official["embedding"])
        np.testing.assert_allclose(begun, whole[:, :count], rtol=0, atol=TOLERANCE)


def test_only_the_direction_of_a_speaker_counts(encode: Run, official: Any, text: Array) -> None:
    speaker, louder = (encode(text, scale * official["embedding"])[1] for scale in (1, 7))
    np.testing.assert_allclose(louder, speaker, rtol=0, atol=TOLERANCE)


def test_no_speaker_is_finite(encode: Run, text: Array) -> None:
    assert np.isfinite(encode(text, np.zeros((1, 192), np.float32))[1]).all()


@pytest.mark.parametrize(
    ("part", "sizes"), [("text_encoder", {"attention_heads": 5}), ("llm", {"static_chunk_size": 0})]
)
def test_sizes_that_mean_another_model_are_refused(
    config: Config, state: dict[str, torch.Tensor], part: str, sizes: dict[str, int]
) -> None:
    changed = dict(config) | {part: dict(config[part]) | sizes}
    with pytest.raises(CheckpointError, match="multiple of the heads, the chunk size 1"):
        TransformerLM.from_state(changed, state, "llm.pt")
