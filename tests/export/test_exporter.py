"""The export: every artifact passes parity and carries its manifest, or nothing changes."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from torch import nn

from cosytriton_ensemble.pipeline import NATIVE_STAGES, PROMPT_MEL_STAGE
from cosytriton_ensemble.repository import artifacts, check_repository
from cosytriton_ensemble.spec import Array, Feed, Size, Stage
from cosytriton_export import exporter
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.commands import EXPORT, WRITE
from cosytriton_export.errors import CheckpointError, ExportError
from cosytriton_export.exporter import export_checkpoint
from cosytriton_export.parity import SIZES, ParityRow, Reference, format_table, measure, stage_reference

CHEAP = PROMPT_MEL_STAGE.name  # the stage that exports fastest


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_the_repository_is_complete(tiny_repository: Path) -> None:
    check_repository(tiny_repository)
    assert not list(tiny_repository.rglob(".export*"))


@pytest.mark.parametrize("model", artifacts())
def test_a_manifest_says_what_an_artifact_was_made_from(
    tiny_repository: Path, tiny_checkpoint: Checkpoint, model: str
) -> None:
    folder = tiny_repository / model / "1"
    manifest = json.loads((folder / "manifest.json").read_text())
    name = artifacts()[model]
    assert manifest["stage"] == model
    assert manifest["sha256"] == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}
    assert manifest["checkpoint"] == tiny_checkpoint.digest
    assert manifest["family"] == "cosyvoice2"
    assert manifest["untrained"] is True
    assert manifest["precision"] == "fp32"
    assert set(manifest["tools"]) >= {"torch", "onnx", "onnxruntime"}
    if name.endswith(".onnx"):
        graph = onnx.load(folder / name)
        assert manifest["opset"] == graph.opset_import[0].version
        assert len(manifest["errors"]) == 6  # three sizes, two batches
        assert max(manifest["errors"].values()) <= max(manifest["tolerance"], 1e-3)


@pytest.mark.parametrize("stage", NATIVE_STAGES, ids=lambda stage: stage.name)
def test_a_graph_has_the_declared_inputs_and_outputs(tiny_repository: Path, stage: Stage) -> None:
    graph = onnx.load(tiny_repository / stage.name / "1" / "model.onnx").graph
    assert [value.name for value in graph.input] == [tensor.name for tensor in stage.inputs]
    assert [value.name for value in graph.output] == [tensor.name for tensor in stage.outputs]


def test_equal_checkpoints_give_equal_artifacts(
    tiny_checkpoint: Checkpoint, tiny_repository: Path, tmp_path: Path
) -> None:
    export_checkpoint(tiny_checkpoint, tmp_path, ["text_frontend", CHEAP])
    for model in ("text_frontend", CHEAP):
        new, old = (contents(repository / model / "1") for repository in (tmp_path, tiny_repository))
        assert new == {name: old[name] for name in new}


def test_large_weights_of_a_replaced_graph_are_removed(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / CHEAP / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx.data").write_bytes(b"weights of a larger model")
    export_checkpoint(tiny_checkpoint, tmp_path, [CHEAP])
    assert sorted(contents(folder)) == ["manifest.json", "model.onnx"]


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mel, count: (mel, count + 1), "output 'prompt_frame_count'.* differs"),
        (lambda mel, count: (mel * np.float32("nan"), count), "output 'prompt_mel'.* is not finite"),
        (lambda mel, count: (mel[:, :-1], count), r"output 'prompt_mel'.* PyTorch gives float32"),
    ],
)
def test_parity_names_what_differs(tiny_repository: Path, change: object, message: str) -> None:
    feed = PROMPT_MEL_STAGE.sample("min")
    path = tiny_repository / CHEAP / "1" / "model.onnx"
    kept: list[tuple[Array, ...]] = []

    def reference(given: Feed) -> tuple[Array, ...]:
        kept.append(tuple(ort.InferenceSession(path).run(None, given)))
        return kept[-1]

    assert measure(path, reference, {("min", 1): feed}, 0) == {("min", 1): 0}
    with pytest.raises(ExportError, match=message):
        measure(path, lambda _: change(*kept[0]), {("min", 1): feed}, 1e-4)  # type: ignore[operator]


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match="ONNX Runtime refuses the graph"):
        measure(tmp_path / "model.onnx", lambda _: [], {}, 0)


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


def test_the_table_shows_errors_and_that_weights_are_untrained() -> None:
    errors: dict[tuple[Size, int], float] = {(size, batch): 1e-6 for size in SIZES for batch in (1, 3)}
    rows = [ParityRow("flow", 18, 2.5, 1e-4, errors), ParityRow("text_frontend", None, 0.1, 0, {})]
    table = format_table(rows, untrained=True)
    assert "| flow          | 18    | 2.5 | 1.0e-06 / 1.0e-06 |" in table
    assert table.endswith("untrained: its sound is noise")
    assert "untrained" not in format_table(rows, untrained=False)


def test_the_commands_write_and_export_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, arguments in (
        (WRITE, [str(tmp_path / "checkpoint"), "--seed", "3"]),
        (
            EXPORT,
            [
                str(tmp_path / "checkpoint"),
                "--repository",
                str(tmp_path / "out"),
                "--stages",
                "text_frontend",
            ],
        ),
    ):
        parser = argparse.ArgumentParser()
        command.arguments(parser)
        assert command.run(parser.parse_args(arguments)) == 0
    assert capsys.readouterr().out.count("its sound is noise") == 2
    assert (tmp_path / "out" / "text_frontend" / "1" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "flow" / "config.pbtxt").is_file()
