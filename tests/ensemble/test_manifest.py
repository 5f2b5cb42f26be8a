"""An artifact is believed only where its whole manifest fits the files, the repository and the machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import Manifest, check_artifact, identity_of, manifest_path

GRAPH, INT8, PLAN = "model.onnx", "model.int8.onnx", "model.fp16.plan"
FP16 = "model.fp16.onnx"
L4 = Machine(gpu="NVIDIA L4 8.9", tensorrt="10.13.3.9")
NOBODY = Machine(gpu=None, tensorrt=None)
MADE_BY = {GRAPH: "export CHECKPOINT", INT8: "build --profile cpu_int8", PLAN: "build --profile gpu_fp16"}


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def place(repository: Path, model: str, name: str, **facts: Any) -> Path:
    """Write an artifact of some content and its manifest, all right but for `facts`."""
    folder = repository / model / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"content of {model}'s {name}")
    right: dict[str, Any] = {
        "stage": model,
        "artifact": name,
        "files": {name: sha256_of(folder / name)},
        "checkpoint": "ab12",
        "family": "cosyvoice2",
        "untrained": False,
        "precision": "fp32",
        "tools": {"onnxruntime": "1.32.0"},
        "tolerance": {"mel_snr": 20.0, "mel_distance": 0.5},
        "errors": {"mel_snr": 31.5, "mel_distance": 0.25, "seconds": 7.0},
        "better": {"mel_snr": "higher"},
    }
    Manifest(**(right | facts)).write(folder)
    return folder / name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two exported models; the flow also for a CPU in INT8 and as a plan, which comes from another graph."""
    repository = tmp_path / "repository"
    for model in ("flow", "vocoder"):
        place(repository, model, GRAPH)
    source = {GRAPH: sha256_of(repository / "flow" / "1" / GRAPH)}
    place(repository, "flow", INT8, precision="int8", source=source, calibration="c0ffee")
    half = place(repository, "flow", FP16, precision="fp16", source=source)
    place(
        repository,
        "flow",
        PLAN,
        precision="fp16",
        source={FP16: sha256_of(half)},
        tensorrt="10.13.3.9",
        gpu="NVIDIA L4 8.9",
    )
    return repository


def change(path: Path, /, **facts: Any) -> None:
    """Rewrite fields of the manifest of the artifact at `path`."""
    path = manifest_path(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def refused(artifact: Path, match: str, machine: Machine = L4, *, hashes: bool = True) -> None:
    with pytest.raises(RepositoryError, match=match) as error:
        check_artifact(artifact, machine, hashes=hashes)
    assert str(artifact) in str(error.value)
    assert f"Run `cosytriton {MADE_BY[artifact.name]}" in str(error.value)


@pytest.mark.parametrize("name", [GRAPH, INT8, FP16, PLAN])
def test_what_fits_is_believed(repository: Path, name: str) -> None:
    manifest = check_artifact(repository / "flow" / "1" / name, L4)
    assert manifest == Manifest.read(repository / "flow" / "1" / name)
    assert manifest.artifact == name


def test_the_flow_says_which_checkpoint_it_is(repository: Path) -> None:
    assert identity_of(repository).checkpoint == "ab12"


# ---- each field ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    # model, artifact, what is wrong, how it is said
    ("vocoder", GRAPH, {"stage": "flow"}, "manifest of the stage 'flow'; it belongs to 'vocoder'"),
    ("flow", INT8, {"artifact": GRAPH}, r"manifest of 'model\.onnx'; it is 'model\.int8\.onnx'"),
    ("flow", INT8, {"files": {}}, r"not covered by its manifest: that lists no model\.int8\.onnx"),
    ("flow", INT8, {"files": {INT8: "00"}}, r"model\.int8\.onnx has sha256 \w{64}, not 00"),
    ("vocoder", GRAPH, {"checkpoint": "cd"}, r"not belong to flow/1/model\.onnx: .*'cd', there it is 'ab12'"),
    ("flow", INT8, {"checkpoint": "cd"}, r"not belong to flow/1/model\.onnx: its checkpoint is 'cd'"),
    ("vocoder", GRAPH, {"family": "cosyvoice1"}, "its family is 'cosyvoice1', there it is 'cosyvoice2'"),
    ("flow", INT8, {"untrained": True}, r"flow/1/model\.onnx: its untrained is True, there it is False"),
    ("flow", INT8, {"precision": "fp32"}, "precision 'fp32' by its manifest, but 'int8' by its name"),
    ("flow", PLAN, {"precision": "int8"}, "precision 'int8' by its manifest, but 'fp16' by its name"),
    ("flow", GRAPH, {"precision": "fp16"}, "precision 'fp16' by its manifest, but 'fp32' by its name"),
    ("flow", GRAPH, {"tools": {}}, "its manifest has no tools"),
    ("flow", INT8, {"source": {}}, r"the manifest of model\.int8\.onnx names none"),
    ("flow", INT8, {"source": {GRAPH: "00"}}, r"is stale: model\.int8\.onnx was built from model\.onnx.* 00"),
    ("flow", INT8, {"calibration": None}, "INT8, but its manifest names no calibration set"),
    ("flow", INT8, {"tolerance": {}}, "never compared with its source: its manifest has no tolerance"),
    ("flow", INT8, {"errors": {}}, "not measured: its manifest limits 'mel_snr'"),
    ("flow", INT8, {"errors": {"mel_snr": 19, "mel_distance": 0}}, "'mel_snr' is 19, allowed is at least 20"),
    ("flow", GRAPH, {"errors": {"mel_snr": 21, "mel_distance": 0.6}}, "is 0.6, allowed is at most 0.5"),
    ("flow", INT8, {"errors": {"mel_snr": 21, "mel_distance": math.nan}}, "'mel_distance' is nan, allowed"),
    ("flow", GRAPH, {"better": {}}, "'mel_snr' is 31.5, allowed is at most 20"),
    ("flow", PLAN, {"tensorrt": None}, "is a plan, but its manifest does not say which TensorRT built it"),
    (
        "flow",
        PLAN,
        {"tensorrt": "10.14.1.48"},
        r"TensorRT 10\.14\.1\.48 and runs on this .* has 10\.13\.3\.9",
    ),
    ("flow", PLAN, {"gpu": None}, "is a plan, but its manifest does not say which GPU it was built on"),
    ("flow", PLAN, {"gpu": "NVIDIA T4 7.5"}, "the GPU 'NVIDIA T4 7.5'; this machine has NVIDIA L4 8.9"),
]
INFORM_ALONE = {"opset", "kept", "portable"}  # the last is wrong only together with a version


@pytest.mark.parametrize(("model", "name", "facts", "message"), WRONG)
def test_a_wrong_field_is_refused_in_its_own_words(
    repository: Path, model: str, name: str, facts: dict[str, Any], message: str
) -> None:
    artifact = repository / model / "1" / name
    change(artifact, **facts)
    refused(artifact, message)


def test_no_field_is_forgotten() -> None:
    assert {name for _, _, facts, _ in WRONG for name in facts} == {
        entry.name for entry in fields(Manifest)
    } - INFORM_ALONE


# ---- the manifest itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "\xff", "[]", "null", "{}"])
def test_a_damaged_manifest_is_refused(repository: Path, text: str) -> None:
    artifact = repository / "flow" / "1" / INT8
    manifest_path(artifact).write_text(text, encoding="latin-1")
    refused(artifact, r"its manifest model\.int8\.onnx\.manifest\.json cannot be read")


@pytest.mark.parametrize("name", [entry.name for entry in fields(Manifest)])
def test_every_field_must_be_said(repository: Path, name: str) -> None:
    """Also what is nothing: a plan without `gpu` was written by something else."""
    artifact = repository / "flow" / "1" / INT8
    values = json.loads(manifest_path(artifact).read_text())
    del values[name]
    manifest_path(artifact).write_text(json.dumps(values))
    refused(artifact, f"cannot be read .it lacks {name}")


def test_a_field_of_another_version_is_refused(repository: Path) -> None:
    change(repository / "flow" / "1" / INT8, sparsity=0.5)
    refused(repository / "flow" / "1" / INT8, "cannot be read .it has the unknown sparsity")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"files": [INT8]}, "files is no Mapping"),
        ({"errors": {"mel_snr": "high"}}, "errors is no Mapping"),
        ({"untrained": "no"}, "untrained is no bool"),
        ({"checkpoint": None, "tools": "many"}, "checkpoint is no str, tools is no Mapping"),
    ],
)
def test_a_field_of_another_type_is_refused(repository: Path, facts: dict[str, Any], message: str) -> None:
    change(repository / "flow" / "1" / INT8, **facts)
    refused(repository / "flow" / "1" / INT8, message)


# ---- what was built a moment, or an export, ago -------------------------------------------------------


def die_before_the_manifest(artifact: Path) -> None:
    manifest_path(artifact).unlink()


def die_behind_the_old_manifest(artifact: Path) -> None:
    artifact.write_text("a new artifact, whose manifest was not written any more")


def die_within_the_artifact(artifact: Path) -> None:
    artifact.write_text(artifact.read_text()[:-1])


def die_with_an_empty_artifact(artifact: Path) -> None:
    artifact.write_bytes(b"")


def die_within_the_manifest(artifact: Path) -> None:
    path = manifest_path(artifact)
    path.write_text(path.read_text()[:-20])


def die_before_the_artifact(artifact: Path) -> None:
    artifact.unlink()


DEATHS = (
    die_before_the_manifest,
    die_behind_the_old_manifest,
    die_within_the_artifact,
    die_with_an_empty_artifact,
    die_within_the_manifest,
    die_before_the_artifact,
)


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("name", [GRAPH, INT8, PLAN])
@pytest.mark.parametrize("die", DEATHS)
def test_what_a_killed_build_leaves_is_not_believed(
    repository: Path, die: Callable[[Path], None], name: str, hashes: bool
) -> None:
    artifact = repository / "flow" / "1" / name
    die(artifact)
    refused(artifact, "cannot be read|is not what its manifest|is not whole", hashes=hashes)


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("name", [INT8, PLAN])
def test_a_new_export_makes_everything_built_stale(repository: Path, name: str, hashes: bool) -> None:
    """The plan too, though the graph between them is as it was."""
    graph = repository / "flow" / "1" / GRAPH
    graph.write_text("another export of the same checkpoint")
    change(graph, files={GRAPH: sha256_of(graph)})
    refused(repository / "flow" / "1" / name, r"is stale: .* was built from model\.onnx", hashes=hashes)


@pytest.mark.parametrize("hashes", [True, False])
def test_a_source_that_changed_behind_its_manifest_makes_stale(repository: Path, hashes: bool) -> None:
    (repository / "flow" / "1" / GRAPH).write_text("put here by hand")
    refused(repository / "flow" / "1" / INT8, "is stale", hashes=hashes)


def test_the_manifest_of_a_source_is_enough(repository: Path) -> None:
    """A machine that serves plans need not hold the graphs."""
    for graph in (GRAPH, FP16):
        (repository / "flow" / "1" / graph).unlink()
    check_artifact(repository / "flow" / "1" / PLAN, L4)
    manifest_path(repository / "flow" / "1" / FP16).unlink()
    with pytest.raises(RepositoryError, match=r"model\.fp16\.onnx cannot be trusted"):
        check_artifact(repository / "flow" / "1" / PLAN, L4)


def test_without_hashes_what_is_older_than_its_manifest_is_not_read(repository: Path) -> None:
    artifact = repository / "vocoder" / "1" / GRAPH
    artifact.write_text("other weights")
    refused(artifact, "is not what its manifest was written for", hashes=False)
    os.utime(artifact, (0, manifest_path(artifact).stat().st_mtime - 1))
    check_artifact(artifact, L4, hashes=False)
    refused(artifact, "is not what its manifest was written for")


# ---- files beside an artifact -------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["model.onnx.data", "text_encoder.onnx", "text_encoder.onnx.data"])
def test_files_beside_an_artifact_belong_to_it(repository: Path, beside: str) -> None:
    artifact = repository / "vocoder" / "1" / GRAPH
    artifact.with_name(beside).write_text("more weights")
    refused(artifact, f"not covered by its manifest: that lists no {beside}")
    change(artifact, files={name: sha256_of(artifact.with_name(name)) for name in (GRAPH, beside)})
    check_artifact(artifact, L4)
    artifact.with_name(beside).write_text("other weights")
    refused(artifact, f"{beside} has sha256")
    artifact.with_name(beside).unlink()
    refused(artifact, f"is not whole: its manifest lists {beside}, which is missing")


def test_what_is_built_from_a_text_encoder_has_one(repository: Path) -> None:
    graph, built = (repository / "flow" / "1" / name for name in (GRAPH, INT8))
    graph.with_name("text_encoder.onnx").write_text("embeds")
    change(graph, files={name: sha256_of(graph.with_name(name)) for name in (GRAPH, "text_encoder.onnx")})
    refused(built, r"that lists no text_encoder\.int8\.onnx")
    built.with_name("text_encoder.int8.onnx").write_text("embeds in INT8")
    change(built, files={name: sha256_of(built.with_name(name)) for name in (INT8, "text_encoder.int8.onnx")})
    check_artifact(built, L4)


# ---- precision, and the machine -----------------------------------------------------------------------


def test_a_stage_without_weights_stays_fp32_in_every_plan(repository: Path) -> None:
    graph = place(repository, "prompt_mel", GRAPH)
    facts = {"source": {GRAPH: sha256_of(graph)}, "tensorrt": L4.tensorrt, "gpu": L4.gpu}
    check_artifact(place(repository, "prompt_mel", PLAN, **facts), L4)
    refused(place(repository, "prompt_mel", PLAN, precision="fp16", **facts), "but 'fp32' by its name")


@pytest.mark.parametrize(
    ("built", "portable", "here", "runs"),
    [
        ("10.13.3.9", "", "10.13.3.11", True),  # the fourth number is the build
        ("10.13.3.9", "", "10.13.3", True),
        ("10.13.3.9", "", "10.13.2.9", False),
        ("10.9.0.34", "version", "10.13.3.9", True),
        ("10.13.3.9", "version", "10.9.0.34", False),  # older: by number, not by text
        ("10.13.3.9", "version", "10.16.1.11", True),
        ("10.13.3.9", "version", "11.4.0.106", False),
        ("10.13.3.9", "", None, False),
        ("10.13.3.9", "version", None, False),
    ],
)
def test_a_plan_runs_on_its_version_or_newer_where_it_may(
    repository: Path, built: str, portable: str, here: str | None, runs: bool
) -> None:
    plan, machine = repository / "flow" / "1" / PLAN, Machine(L4.gpu, here)
    change(plan, tensorrt=built, portable=portable)
    if runs:
        check_artifact(plan, machine)
    else:
        refused(plan, f"built by TensorRT {built} .*; this machine has {here or 'none'}", machine)


def test_a_plan_does_not_run_without_a_gpu(repository: Path) -> None:
    refused(repository / "flow" / "1" / PLAN, "this machine has none", NOBODY)
    refused(repository / "flow" / "1" / PLAN, "GPU .*; this machine has none", Machine(None, L4.tensorrt))


def test_only_a_plan_asks_about_the_machine(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def here() -> Machine:
        asked.append(None)
        return L4

    monkeypatch.setattr(Machine, "here", here)
    for name in (GRAPH, INT8, FP16):
        check_artifact(repository / "flow" / "1" / name)
    assert not asked
    check_artifact(repository / "flow" / "1" / PLAN)
    assert asked
