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

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.layout import LAYOUTS, SPEAKERS, TEXT_MODEL
from cosytriton_export.writer import write_checkpoint

FILES = LAYOUTS[COSYVOICE2.name].files


@pytest.fixture
def directory(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny checkpoint of each family. Copy its directory before you change a file."""
    return write_checkpoint(tmp_path_factory.mktemp("written") / "checkpoint", family=request.param)


def test_an_opened_checkpoint_gives_configuration_and_weights(written: Checkpoint) -> None:
    family = written.family
    assert (written.path / family.config_file).is_file()
    assert written.untrained
    assert written.config["llm"]["speech_token_size"] == family.speech_codes
    rows = {COSYVOICE1: 4096, COSYVOICE2: 6564, COSYVOICE3: 6761}[family]
    width = written.config["llm_input_size"]
    assert written.state("llm")["speech_embedding.weight"].shape == (rows, width)
    assert written.onnx("campplus").graph.input[0].name == "input"
    assert [node.name for node in written.onnx("speech_tokenizer").graph.input] == ["feats", "feats_length"]


@pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE2, COSYVOICE3], ids=lambda family: family.name)
def test_a_checkpoint_has_the_official_file_names(family: Family) -> None:
    number = {COSYVOICE1: 1, COSYVOICE2: 2, COSYVOICE3: 3}[family]
    files = LAYOUTS[family.name].files
    assert f"speech_tokenizer_v{number}.onnx" in files
    assert any(name.startswith(TEXT_MODEL) for name in files) == (number > 1)


def test_only_families_with_qwen_have_its_sizes(written: Checkpoint) -> None:
    if written.family is COSYVOICE1:
        with pytest.raises(CheckpointError, match="CosyVoice-300M has no Qwen2 directory"):
            _ = written.qwen_config
    else:
        assert written.qwen_config["hidden_size"] == written.config["llm_input_size"]


def test_the_official_order_decides_between_two_configurations(written: Checkpoint, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(written.path, tmp_path / "copy"))
    (copy / "cosyvoice3.yaml").touch()
    assert Checkpoint.open(copy).family is written.family


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


def test_the_digest_covers_the_speakers(directory: Path) -> None:
    before = Checkpoint.open(directory).digest
    (directory / SPEAKERS).unlink()
    assert Checkpoint.open(directory).digest != before


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
    with pytest.raises(
        CheckpointError, match=r"is no CosyVoice checkpoint.*cosyvoice\.yaml.*2\.yaml.*3\.yaml"
    ):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_configuration_under_the_name_of_another_family_is_refused(directory: Path) -> None:
    """The first release of CosyVoice 2 called its file cosyvoice.yaml."""
    (directory / "cosyvoice2.yaml").rename(directory / "cosyvoice.yaml")
    (directory / "speech_tokenizer_v1.onnx").write_bytes(b"x")
    with pytest.raises(
        CheckpointError,
        match=r"cosyvoice\.yaml: its classes .*Qwen2LM.* those of CosyVoice2-0\.5B: name .* cosyvoice2\.yaml",
    ):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llm.Qwen2LM", "llm.OtherLM", "classes cosyvoice.llm.llm.OtherLM.* do not fit its name.*Qwen2LM"),
        (
            "input_frame_rate: !ref <token_frame_rate>",
            "input_frame_rate: 50",
            "input_frame_rate: 50 is given",
        ),
        (
            "sample_rate: 24000",
            "sample_rate: 22050",
            "sample_rate: 22050 is given, CosyVoice2-0.5B has 24000",
        ),
        ("hift: !new", "hifi: !new", "there is no key 'hift'"),
    ],
)
def test_a_configuration_that_is_not_of_its_family_is_refused(
    directory: Path, old: str, new: str, message: str
) -> None:
    path = directory / "cosyvoice2.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


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
