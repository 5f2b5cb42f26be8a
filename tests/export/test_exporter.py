"""The export: every artifact passes parity and carries its manifest, or nothing changes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from torch import nn

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.manifest import Manifest
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.registry import VoiceFolder
from cosytriton_ensemble.repository import SPEAKERS, artifacts, check_repository, checkpoint_of
from cosytriton_ensemble.spec import Array, Stage
from cosytriton_export import exporter
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.exporter import export_checkpoint
from cosytriton_export.parity import Reference, stage_reference
from cosytriton_export.speakers import read_speakers
from cosytriton_export.tokenizer import build_tokenizer

PIPELINE = pipeline_of(COSYVOICE2)
CHEAP = PIPELINE.prompt_mel.name  # the stage that exports fastest
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
Checkpoints = Callable[[Family], Checkpoint]
Repositories = Callable[[Family], Path]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@EVERY_FAMILY
def test_the_repository_is_complete(
    repositories: Repositories, checkpoints: Checkpoints, family: Family
) -> None:
    check_repository(repositories(family))
    assert checkpoint_of(repositories(family)) == f"{family.name}:{checkpoints(family).digest}"
    assert not list(repositories(family).rglob(".draft*"))


@pytest.mark.parametrize(
    ("family", "model"), [(f, m) for f in FAMILIES.values() for m in artifacts(pipeline_of(f))]
)
def test_a_manifest_says_what_an_artifact_was_made_from(
    repositories: Repositories, checkpoints: Checkpoints, family: Family, model: str
) -> None:
    folder, name = repositories(family) / model / "1", artifacts(pipeline_of(family))[model]
    manifest = Manifest.read(folder / name)
    files = {name, "text_encoder.onnx"} if (family, model) == (COSYVOICE1, "speech_lm") else {name}
    assert manifest.stage == model
    assert manifest.artifact == name
    assert manifest.files == {
        file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files
    }
    assert manifest.source == {}
    assert manifest.checkpoint == checkpoints(family).digest
    assert manifest.family == family.name
    assert manifest.untrained is True
    assert manifest.precision == "fp32"
    assert set(manifest.tools) >= {"torch", "onnx", "onnxruntime"}
    if name.endswith(".onnx"):
        graph = onnx.load(folder / name)
        assert manifest.opset == graph.opset_import[0].version
        assert len(manifest.errors) == (3 if model == "tts_stream" else 6)  # three sizes, one or two batches
        assert manifest.tolerance.keys() == manifest.errors.keys()
        assert max(manifest.tolerance.values()) <= 1e-3


def test_a_language_model_is_not_whole_without_its_text_encoder(
    repositories: Repositories, tmp_path: Path
) -> None:
    repository = Path(shutil.copytree(repositories(COSYVOICE1), tmp_path / "repository"))
    (repository / "speech_lm" / "1" / "text_encoder.onnx").unlink()
    with pytest.raises(RepositoryError, match=r"speech_lm/1/model\.onnx is not whole: .* text_encoder\.onnx"):
        check_repository(repository)


@EVERY_FAMILY
@pytest.mark.parametrize("name", [stage.name for stage in PIPELINE.native_stages])
def test_a_graph_has_the_declared_inputs_and_outputs(
    repositories: Repositories, family: Family, name: str
) -> None:
    stage = next(stage for stage in pipeline_of(family).native_stages if stage.name == name)
    graph = onnx.load(repositories(family) / name / "1" / "model.onnx").graph
    assert [value.name for value in graph.input] == [tensor.name for tensor in stage.inputs]
    assert [value.name for value in graph.output] == [tensor.name for tensor in stage.outputs]


@EVERY_FAMILY
def test_the_checkpoints_own_speakers_are_voices_of_the_server(
    checkpoints: Checkpoints, tmp_path: Path, family: Family
) -> None:
    checkpoint = checkpoints(family)
    (row,) = export_checkpoint(checkpoint, tmp_path, ["tts"])
    assert (row.opset, row.errors) == (None, {})
    file, identity = tmp_path / "tts" / "1" / SPEAKERS, f"{family.name}:{checkpoint.digest}"
    voices = VoiceFolder(tmp_path / "none", identity, file)
    assert voices.names() == ["中文女", "英文女"]
    bare, whole = (voices.get(name).checked(family) for name in ("中文女", "英文女"))
    assert not bare.has_reference
    assert not np.array_equal(bare.speaker, whole.speaker)
    assert whole.has_reference == (family is not COSYVOICE1)
    if whole.has_reference:
        assert whole.mel.shape == (family.frames(len(whole.tokens)), 80)
        ids = build_tokenizer(checkpoint).encode(whole.transcript, add_special_tokens=False).ids
        assert ids == read_speakers(checkpoint)["英文女"].prompt_text_ids.tolist()


def test_a_checkpoint_without_speakers_has_a_file_without_voices(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints(COSYVOICE1).path, tmp_path / "copy"))
    (path / "spk2info.pt").unlink()
    export_checkpoint(Checkpoint.open(path), tmp_path / "new", ["tts"])
    assert (
        VoiceFolder(tmp_path / "none", "cosyvoice1:ab", tmp_path / "new" / "tts" / "1" / SPEAKERS).names()
        == []
    )


def test_equal_checkpoints_give_equal_artifacts(
    tiny_checkpoint: Checkpoint, tiny_repository: Path, tmp_path: Path
) -> None:
    export_checkpoint(tiny_checkpoint, tmp_path, ["text_frontend", CHEAP])
    for model in ("text_frontend", CHEAP):
        new, old = (contents(repository / model / "1") for repository in (tmp_path, tiny_repository))
        assert new == {name: old[name] for name in new}


def draft_of(folder: Path, *names: str) -> Path:
    """A stage's new files, as they wait to be published."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"new {name}")
    return folder


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("model.onnx model.onnx.data", "model.onnx", "model.onnx model.onnx.manifest.json"),  # it was larger
        ("model.onnx text_encoder.onnx", "model.onnx", "model.onnx model.onnx.manifest.json"),  # it was v1's
        (
            "model.onnx text_encoder.onnx text_encoder.onnx.data",
            "model.onnx model.onnx.data",
            "model.onnx model.onnx.data model.onnx.manifest.json",
        ),
        (
            "model.onnx",
            "model.onnx text_encoder.onnx",
            "model.onnx model.onnx.manifest.json text_encoder.onnx",
        ),
        ("model.py .gitkeep", "model.onnx", ".gitkeep model.onnx model.onnx.manifest.json model.py"),
        ("model.int8.onnx", "model.onnx", "model.int8.onnx model.onnx model.onnx.manifest.json"),  # stale now
    ],
)
def test_nothing_of_a_replaced_model_is_left(tmp_path: Path, old: str, new: str, left: str) -> None:
    place = tmp_path / "speech_lm" / "1"
    place.mkdir(parents=True)
    for name in [*old.split(), "model.onnx.manifest.json"]:
        (place / name).write_text("old")
    written = [*new.split(), "model.onnx.manifest.json"]
    exporter._publish(draft_of(tmp_path / "draft", *written), place)
    assert sorted(contents(place)) == left.split()
    assert all((place / name).read_text() == f"new {name}" for name in written)


def test_the_manifest_is_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the weights before their graph: what is not whole never looks so."""
    moved: list[str] = []
    replace = Path.replace

    def follow(file: Path, target: Path) -> Path:
        moved.append(file.name)
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", follow)
    draft = draft_of(tmp_path / "draft", "model.onnx", "model.onnx.manifest.json", "model.onnx.data")
    exporter._publish(draft, tmp_path / "place")
    assert moved == ["model.onnx.data", "model.onnx", "model.onnx.manifest.json"]


def test_a_failed_export_leaves_the_old_artifacts(
    tiny_checkpoint: Checkpoint, tiny_repository: Path, tmp_path: Path
) -> None:
    repository = Path(shutil.copytree(tiny_repository, tmp_path / "repository"))
    broken = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "broken"))
    weights = (broken / "flow.pt").read_bytes()
    (broken / "flow.pt").write_bytes(weights[: len(weights) // 2])
    before = contents(repository)
    with pytest.raises(CheckpointError, match=r"flow\.pt.*truncated"):
        export_checkpoint(Checkpoint.open(broken), repository, ["text_frontend", CHEAP, "flow"])
    assert contents(repository) == before


def test_a_failed_export_to_a_new_repository_leaves_nothing(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "broken"))
    (broken / "hift.pt").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"hift\.pt"):
        export_checkpoint(Checkpoint.open(broken), tmp_path / "repository", ["text_frontend", "vocoder"])
    assert not list((tmp_path / "repository").iterdir())


def test_a_stage_beyond_its_tolerance_is_refused_and_not_published(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = stage_reference

    def drifted(stage: Stage, module: nn.Module) -> Reference:
        run = honest(stage, module)
        return lambda feed: [_off(output) for output in run(feed)]

    def _off(output: Array) -> Array:
        return output + np.float32(0.01) if output.dtype == np.float32 else output

    monkeypatch.setattr(exporter, "stage_reference", drifted)
    with pytest.raises(
        ExportError, match=r"output 'prompt_mel' at size 'min' with 1 rows differs .* allowed is 1e-04"
    ):
        export_checkpoint(tiny_checkpoint, tmp_path, [CHEAP])
    assert not contents(tmp_path)


def test_an_unknown_stage_is_refused_with_the_known_ones(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"unknown stages nonsense; known are .*vocoder.*speech_lm"):
        export_checkpoint(tiny_checkpoint, tmp_path / "new", ["flow", "nonsense"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("channels: [32]", "channels: [48]", CheckpointError),
        ("channels: [32]", "channels: nothing", CheckpointError),
        ("attention_heads: 4", "attention_heads: 0", ExportError),
        ("linear_units: 128", "linear_units: many", ExportError),
        ("pre_lookahead_len: 3", "other: 3", CheckpointError),
    ],
)
def test_an_impossible_configuration_is_refused(
    tiny_checkpoint: Checkpoint, tmp_path: Path, old: str, new: str, error: type[Exception]
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))
    text = (path / "cosyvoice2.yaml").read_text()
    assert old in text
    (path / "cosyvoice2.yaml").write_text(text.replace(old, new))
    with pytest.raises(error):
        export_checkpoint(Checkpoint.open(path), tmp_path / "repository", ["flow"])
