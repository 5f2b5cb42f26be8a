"""A checkpoint directory is either read as what it claims to be, or refused by name, and runs no code."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from cosytriton_ensemble.pipeline import COSYVOICE2
from cosytriton_export.checkpoint import FILES, Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.weights import fold_weight_norm, load_weights

NORM_TOLERANCE = 1e-6


@pytest.fixture
def directory(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))


def test_an_opened_checkpoint_gives_configuration_and_weights(tiny_checkpoint: Checkpoint) -> None:
    assert tiny_checkpoint.family is COSYVOICE2
    assert tiny_checkpoint.untrained
    assert tiny_checkpoint.config["llm"]["speech_token_size"] == COSYVOICE2.speech_codes
    hidden = tiny_checkpoint.qwen_config["hidden_size"]
    assert tiny_checkpoint.state("llm")["speech_embedding.weight"].shape == (6564, hidden)
    assert tiny_checkpoint.onnx("campplus").graph.input[0].name == "input"


def test_the_demo_voice_opens_and_is_trained(demo_checkpoint: Checkpoint) -> None:
    assert not demo_checkpoint.untrained
    assert demo_checkpoint.state("flow")


def test_the_digest_changes_with_any_file(directory: Path, tiny_checkpoint: Checkpoint) -> None:
    assert Checkpoint.open(directory).digest == tiny_checkpoint.digest
    for name in ("hift.pt", "CosyVoice-BlankEN/merges.txt"):
        before = Checkpoint.open(directory).digest
        with (directory / name).open("ab") as file:
            file.write(b"\n")
        assert Checkpoint.open(directory).digest != before


def test_weight_norm_is_folded_in_both_key_layouts() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(3, 5, 4))
    layer.parametrizations.weight.original0.data.uniform_(0.5, 2)
    new = {f"up.{key}": value for key, value in layer.state_dict().items()}
    old = {
        "up.bias": new["up.bias"],
        "up.weight_g": new["up.parametrizations.weight.original0"],
        "up.weight_v": new["up.parametrizations.weight.original1"],
    }
    for state in (new, old):
        folded = fold_weight_norm(state)
        assert sorted(folded) == ["up.bias", "up.weight"]
        torch.testing.assert_close(folded["up.weight"], layer.weight, atol=NORM_TOLERANCE, rtol=0)


def test_a_vocoder_from_adversarial_training_loses_its_prefix(directory: Path) -> None:
    path = directory / "hift.pt"
    torch.save({f"generator.{key}": value for key, value in torch.load(path).items()}, path)
    state = Checkpoint.open(directory).state("hift")
    assert "conv_pre.weight" in state
    assert not any("generator" in key or "parametrizations" in key for key in state)


class _Planted:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.victim,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(directory: Path, zipped: bool) -> None:
    victim, path = directory / "victim", directory / "flow.pt"
    if zipped:
        torch.save({"weight": _Planted(victim)}, path)
    else:
        path.write_bytes(pickle.dumps({"weight": _Planted(victim)}))
    with pytest.raises(CheckpointError, match=r"flow\.pt.*Nothing of it was run"):
        Checkpoint.open(directory).state("flow")
    assert not victim.exists()


@pytest.mark.parametrize("kept", [0.0001, 0.5, 0.99])
def test_a_truncated_file_is_refused(directory: Path, kept: float) -> None:
    path = directory / "flow.pt"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept) + 1])
    with pytest.raises(CheckpointError, match=r"flow\.pt"):
        Checkpoint.open(directory).state("flow")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds list, not a non-empty state dict"),
        ({}, "holds dict, not a non-empty state dict"),
        ({"epoch": 3, "state_dict": {"w": torch.ones(1)}}, "no plain tensors: 'epoch', 'state_dict'"),
        ({"good": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}, "NaN or infinite values in bad"),
        ({"bad": torch.tensor(float("inf"))}, "NaN or infinite values in bad"),
        ({"a.weight_g": torch.ones(2, 1, 1)}, "weight norm of 'a'.*is missing"),
        (
            {"a.weight_g": torch.ones(3, 1, 1), "a.weight_v": torch.ones(2, 2, 2)},
            "does not fit the direction",
        ),
        ({"a.weight_g": torch.ones(2, 1), "a.weight_v": torch.zeros(2, 2)}, "all zeros"),
    ],
)
def test_a_file_that_is_no_plain_finite_state_dict_is_refused(
    directory: Path, content: object, message: str
) -> None:
    torch.save(content, directory / "hift.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(directory).state("hift")
    assert "hift.pt" in str(caught.value)


def test_half_precision_is_read_as_float32(directory: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.float16)}, directory / "flow.pt")
    assert Checkpoint.open(directory).state("flow")["a"].dtype == torch.float32


def test_a_directory_without_configuration_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no CosyVoice checkpoint.*cosyvoice2\.yaml"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["cosyvoice.yaml", "cosyvoice3.yaml"])
def test_other_families_are_recognised_and_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a: 1")
    with pytest.raises(CheckpointError, match=rf"holds {name}.*not supported yet.*cosyvoice2"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_empty_file_is_named(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"empty files: {name}"):
        Checkpoint.open(directory)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(("text", "message"), [("{", "no readable JSON"), ("[1]", "holds list")])
def test_a_damaged_qwen_configuration_is_refused(directory: Path, text: str, message: str) -> None:
    (directory / "CosyVoice-BlankEN" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        _ = Checkpoint.open(directory).qwen_config


def test_a_missing_qwen_key_is_named(directory: Path) -> None:
    (directory / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(CheckpointError, match=r"config\.json: there is no key 'vocab_size'"):
        Checkpoint.open(directory).qwen_config["vocab_size"]


def test_a_damaged_onnx_file_is_refused(directory: Path) -> None:
    path = directory / "campplus.onnx"
    whole = path.read_bytes()
    for damaged in (whole[:1000], b"no onnx", b"\x00"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"campplus\.onnx"):
            Checkpoint.open(directory).onnx("campplus")


def test_an_onnx_file_with_weights_that_are_not_finite_is_refused(directory: Path) -> None:
    path = directory / "campplus.onnx"
    model = onnx.load(path)
    weight = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and t.raw_data)
    weight.raw_data = b"\xff" * len(weight.raw_data)  # NaN
    onnx.save(model, path)
    with pytest.raises(CheckpointError, match=f"NaN or infinite values in {weight.name}"):
        Checkpoint.open(directory).onnx("campplus")


def test_an_onnx_file_never_leads_to_another_file(directory: Path) -> None:
    path = directory / "campplus.onnx"
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="elsewhere", size_threshold=0)
    with pytest.raises(CheckpointError, match="keeps weights in another file"):
        Checkpoint.open(directory).onnx("campplus")


def test_foreign_weights_are_refused_with_their_keys() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    state = {"0.weight": torch.ones(3, 4), "1.gamma": torch.ones(1)}
    with pytest.raises(
        CheckpointError,
        match=r"x\.pt does not fit.*unknown keys: 1\.gamma; missing keys: 0\.bias; "
        r"wrong shapes: 0\.weight \[3, 4\] instead of \[3, 2\]",
    ):
        load_weights(module, state, "x.pt")


def test_unused_keys_are_the_ones_that_are_declared() -> None:
    module = nn.Linear(2, 3)
    state = dict(nn.Linear(2, 3).state_dict()) | {"extra": torch.ones(1)}
    load_weights(module, state, "x.pt", unused=["extra"])
    torch.testing.assert_close(module.weight.data, state["weight"])
    with pytest.raises(CheckpointError, match="unknown keys: extra"):
        load_weights(module, state, "x.pt")
