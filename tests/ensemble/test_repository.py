"""The model repository: what is committed, what serving needs, and whose checkpoint lies in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from cosytriton_ensemble.errors import InputError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import Manifest, manifest_path
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU, CPU_INT8, GPU, GPU_FP16, PROFILES, Profile
from cosytriton_ensemble.repository import (
    artifacts,
    check_repository,
    checkpoint_of,
    family_of,
    is_untrained,
    skeleton,
    version_directory,
    write_repository,
)

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "model_repository"
PIPELINE = pipeline_of(COSYVOICE2)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def write_manifest(repository: Path, model: str, name: str = "model.onnx", **facts: Any) -> Path:
    """A manifest that fits the file, if there is one, but for `facts`."""
    folder = version_directory(repository, model)
    folder.mkdir(parents=True, exist_ok=True)
    files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob(name)}
    right: dict[str, Any] = {
        "stage": model,
        "artifact": name,
        "files": files,
        "checkpoint": "ab",
        "family": "cosyvoice2",
        "untrained": False,
        "precision": "fp32",
        "tools": {"onnxruntime": "1.32.0"},
    }
    Manifest(**(right | facts)).write(folder)
    return manifest_path(folder / name)


def exported(repository: Path, family: Family, **facts: Any) -> Path:
    """A repository as an export leaves it, with files of no content."""
    write_repository(repository, family)
    for model, name in artifacts(pipeline_of(family)).items():
        (version_directory(repository, model) / name).write_bytes(b"content")
        write_manifest(repository, model, name, **{"family": family.name, **facts})
    return repository


def built(repository: Path, profile: Profile, **facts: Any) -> Path:
    """What a build adds to an exported repository of COSYVOICE2."""
    source = {"model.onnx": hashlib.sha256(b"content").hexdigest()}
    right = {
        "source": source,
        "tolerance": {"snr": 20.0},
        "errors": {"snr": 30.0},
        "better": {"snr": "higher"},
        "calibration": "c0ffee",
        "tensorrt": "10.13.3.9",
        "gpu": "NVIDIA L4 8.9",
    }
    for model, name in artifacts(PIPELINE, profile).items():
        if not (version_directory(repository, model) / name).exists():
            (version_directory(repository, model) / name).write_bytes(b"built content")
            precision = "fp32" if model == PIPELINE.prompt_mel.name else profile.precision
            write_manifest(repository, model, name, **{"precision": precision, **right, **facts})
    return repository


@pytest.mark.parametrize("name", skeleton())
def test_committed_files_have_not_drifted(name: str) -> None:
    assert (COMMITTED / name).read_text(encoding="utf-8") == skeleton()[name], "run `cosytriton repository`"


def test_nothing_else_is_committed_as_a_model() -> None:
    declared = {name.split("/")[0] for name in skeleton()}
    assert {path.name for path in COMMITTED.iterdir() if path.is_dir()} == declared
    configured = {str(path.relative_to(COMMITTED)) for path in COMMITTED.rglob("*.pbtxt")}
    assert configured == {name for name in skeleton() if name.endswith(".pbtxt")}


@EVERY_FAMILY
def test_a_python_model_has_its_code_in_the_package(family: Family) -> None:
    models = ROOT / "ensemble" / "cosytriton_ensemble" / "models"
    for stage in pipeline_of(family).python_stages:
        assert (
            f"from cosytriton_ensemble.models.{stage.name} import"
            in skeleton(family)[f"{stage.name}/1/model.py"]
        )
        assert (models / f"{stage.name}.py").is_file()


def test_a_skeleton_leaves_nothing_of_another_familys_behind(tmp_path: Path) -> None:
    for family in (COSYVOICE2, COSYVOICE1):
        write_repository(tmp_path, family)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == set(skeleton(COSYVOICE1)) != set(skeleton(COSYVOICE2))


@EVERY_FAMILY
def test_a_repository_without_its_artifacts_is_refused_with_what_is_missing(
    tmp_path: Path, family: Family
) -> None:
    write_repository(tmp_path, family)
    with pytest.raises(RepositoryError, match=r"lacks .*flow/1/model\.onnx.*cosytriton export") as error:
        check_repository(tmp_path)
    assert "configs" not in str(error.value)  # which the export writes too
    for file in ("speech_lm/1/model.onnx", "text_frontend/1/tokenizer.json", "tts/1/speakers.safetensors"):
        assert file in str(error.value)
    check_repository(exported(tmp_path, family))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flow/config.pbtxt", "cosytriton repository .* --family cosyvoice1"),
        ("tts/1/model.py", "cosytriton repository .* --family cosyvoice1"),
        ("tts/1/speakers.safetensors", "cosytriton export CHECKPOINT --repository"),
    ],
)
def test_one_missing_file_is_enough(tmp_path: Path, name: str, command: str) -> None:
    (exported(tmp_path, COSYVOICE1) / name).unlink()
    with pytest.raises(RepositoryError, match=f"lacks {name}. Run `{command}"):
        check_repository(tmp_path)


# ---- profiles -----------------------------------------------------------------------------------------


def test_what_a_profile_serves() -> None:
    stages = ("speaker_embedding", "audio_tokenizer", "flow", "vocoder", "speech_lm", "tts_stream")
    others = {"text_frontend": "tokenizer.json", "tts": "speakers.safetensors"}
    served = dict.fromkeys(stages, "model.int8.onnx") | {"prompt_mel": "model.onnx"} | others
    assert artifacts(PIPELINE, CPU_INT8) == served
    assert artifacts(PIPELINE, GPU) == artifacts(PIPELINE) == artifacts(PIPELINE, CPU)
    assert artifacts(PIPELINE, GPU_FP16)["prompt_mel"] == "model.fp16.plan"
    assert "tts_stream" not in artifacts(PIPELINE, GPU_FP16)  # whose flow has no plan with a state
    assert "tts_stream" not in artifacts(pipeline_of(COSYVOICE1))  # nor has a family without block mask


@pytest.mark.parametrize(
    "profile", [p for p in PROFILES.values() if p not in (CPU, GPU)], ids=lambda p: p.name
)
def test_a_profile_that_was_not_built_is_refused_with_the_command_that_builds_it(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine("NVIDIA L4 8.9", "10.13.3"))
    exported(tmp_path, COSYVOICE2)
    file = artifacts(PIPELINE, profile)["flow"]
    command = f"cosytriton build --profile {profile.name} --repository {tmp_path}"
    with pytest.raises(RepositoryError, match=rf"lacks .*flow/1/{file}.* Run `{command}`\.$") as error:
        check_repository(tmp_path, profile)
    assert "model.onnx" not in str(error.value)
    check_repository(built(tmp_path, profile), profile)
    check_repository(tmp_path)


def test_a_profile_needs_its_own_configurations_alone(tmp_path: Path) -> None:
    built(exported(tmp_path, COSYVOICE2), CPU_INT8)
    (tmp_path / "flow" / "configs" / "cpu_int8.pbtxt").unlink()
    check_repository(tmp_path)
    with pytest.raises(
        RepositoryError, match=r"lacks flow/configs/cpu_int8\.pbtxt. Run `cosytriton repository"
    ):
        check_repository(tmp_path, CPU_INT8)


def test_what_another_profile_serves_is_not_asked_for(tmp_path: Path) -> None:
    built(exported(tmp_path, COSYVOICE2), CPU_INT8, calibration=None)
    check_repository(tmp_path)
    with pytest.raises(RepositoryError, match=r"model\.int8\.onnx is INT8, .* no calibration"):
        check_repository(tmp_path, CPU_INT8)


def test_every_artifact_is_checked(tmp_path: Path) -> None:
    exported(tmp_path, COSYVOICE2)
    for model, name in artifacts(PIPELINE).items():
        file = version_directory(tmp_path, model) / name
        file.write_bytes(b"other content")
        with pytest.raises(
            RepositoryError, match=f"{model}/1/{name} is not what its manifest was written for"
        ):
            check_repository(tmp_path)
        file.write_bytes(b"content")
    check_repository(tmp_path)


# ---- one checkpoint -----------------------------------------------------------------------------------


def test_a_mixture_of_checkpoints_is_refused(tmp_path: Path) -> None:
    write_manifest(exported(tmp_path, COSYVOICE2), "vocoder", checkpoint="cd")
    with pytest.raises(RepositoryError, match="mixes 2 checkpoints .*vocoder.*Export one of them again"):
        check_repository(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_a_damaged_manifest_is_refused_by_its_place(tmp_path: Path, text: str) -> None:
    write_manifest(exported(tmp_path, COSYVOICE2), "vocoder").write_text(text, encoding="latin-1")
    with pytest.raises(
        RepositoryError, match=r"vocoder/1/model\.onnx cannot be trusted.* cannot be read .*export"
    ):
        check_repository(tmp_path)


@EVERY_FAMILY
def test_a_repository_knows_its_checkpoint(tmp_path: Path, family: Family) -> None:
    write_manifest(tmp_path, "flow", family=family.name, checkpoint="ab12")
    assert family_of(tmp_path) is family
    assert checkpoint_of(tmp_path) == f"{family.name}:ab12"


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, "flow", family="cosyvoice9")
    with pytest.raises(InputError, match="no model family 'cosyvoice9'; known are cosyvoice1, cosyvoice2"):
        family_of(tmp_path)


@pytest.mark.parametrize("untrained", [True, False])
def test_a_repository_knows_whether_its_sound_is_noise(tmp_path: Path, untrained: bool) -> None:
    write_manifest(tmp_path, "flow", untrained=untrained)
    assert is_untrained(tmp_path) == untrained


@pytest.mark.parametrize("ask", [family_of, checkpoint_of, is_untrained])
def test_a_repository_that_nothing_was_exported_to_knows_nothing(tmp_path: Path, ask: object) -> None:
    with pytest.raises(RepositoryError, match=r"flow/1/model\.onnx cannot be trusted: .* cannot be read"):
        ask(tmp_path)  # type: ignore[operator]
