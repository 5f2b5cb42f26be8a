"""The model repository: what is committed, what serving needs, and whose checkpoint lies in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosytriton_ensemble.errors import InputError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of
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
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def write_manifest(repository: Path, model: str, **facts: object) -> Path:
    path = version_directory(repository, model) / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"family": "cosyvoice2", "checkpoint": "ab", "untrained": False} | facts))
    return path


def exported(repository: Path, family: Family) -> Path:
    """A repository as an export leaves it, with files of no content."""
    write_repository(repository, family)
    for model, name in artifacts(pipeline_of(family)).items():
        (version_directory(repository, model) / name).write_bytes(b"content")
        write_manifest(repository, model, family=family.name)
    return repository


@pytest.mark.parametrize("name", skeleton())
def test_committed_files_have_not_drifted(name: str) -> None:
    assert (COMMITTED / name).read_text(encoding="utf-8") == skeleton()[name], "run `cosytriton repository`"


def test_nothing_else_is_committed_as_a_model() -> None:
    declared = {name.split("/")[0] for name in skeleton()}
    assert {path.name for path in COMMITTED.iterdir() if path.is_dir()} == declared


@EVERY_FAMILY
def test_a_python_model_has_its_code_in_the_package(family: Family) -> None:
    models = ROOT / "ensemble" / "cosytriton_ensemble" / "models"
    for stage in pipeline_of(family).python_stages:
        assert (
            f"from cosytriton_ensemble.models.{stage.name} import"
            in skeleton(family)[f"{stage.name}/1/model.py"]
        )
        assert (models / f"{stage.name}.py").is_file()


def test_another_familys_skeleton_has_the_same_files() -> None:
    """So that an export over another family's repository leaves no stale model behind."""
    assert len({frozenset(skeleton(family)) for family in FAMILIES.values()}) == 1
    assert skeleton(COSYVOICE1) != skeleton(COSYVOICE2)


@EVERY_FAMILY
def test_a_repository_without_its_artifacts_is_refused_with_what_is_missing(
    tmp_path: Path, family: Family
) -> None:
    write_repository(tmp_path, family)
    with pytest.raises(RepositoryError, match=r"lacks .*flow/1/model\.onnx.*cosytriton export") as error:
        check_repository(tmp_path)
    for file in ("speech_lm/1/model.onnx", "text_frontend/1/tokenizer.json", "tts/1/speakers.safetensors"):
        assert file in str(error.value)
    check_repository(exported(tmp_path, family))


@pytest.mark.parametrize("name", ["flow/config.pbtxt", "tts/1/model.py", "tts/1/speakers.safetensors"])
def test_one_missing_file_is_enough(tmp_path: Path, name: str) -> None:
    (exported(tmp_path, COSYVOICE1) / name).unlink()
    with pytest.raises(RepositoryError, match=f"lacks {name}"):
        check_repository(tmp_path)


def test_a_mixture_of_checkpoints_is_refused(tmp_path: Path) -> None:
    write_manifest(exported(tmp_path, COSYVOICE2), "vocoder", checkpoint="cd")
    with pytest.raises(RepositoryError, match="mixes 2 checkpoints .*vocoder.*Export one of them again"):
        check_repository(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_a_damaged_manifest_is_refused_by_its_place(tmp_path: Path, text: str) -> None:
    write_manifest(exported(tmp_path, COSYVOICE2), "vocoder").write_text(text, encoding="latin-1")
    with pytest.raises(RepositoryError, match=r"vocoder/1/manifest\.json cannot be read .*Export"):
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
    with pytest.raises(RepositoryError, match=r"flow/1/manifest\.json cannot be read"):
        ask(tmp_path)  # type: ignore[operator]
