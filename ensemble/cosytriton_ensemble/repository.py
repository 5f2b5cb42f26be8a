"""Triton's model repository: which files it has, how its skeleton is written, what must lie in it.

<repository>/<model>/config.pbtxt             profile `cpu`
                     configs/<profile>.pbtxt  the others, where they differ
                     1/model.py               Python models: one import
                     1/model.onnx             native stages and speech_lm: written by the export
                     1/model.int8.onnx ...    graphs and plans of other profiles: written by the build
                     1/<file>.manifest.json   what each of these was made from
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, FAMILIES, Family, family_named
from cosytriton_ensemble.manifest import (
    VERSION,
    Manifest,
    check_artifact,
    how_to_make,
    identity_of,
    manifest_path,
)
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.profiles import CPU, PROFILES, Profile
from cosytriton_ensemble.spec import Stage

TOKENIZER = "tokenizer.json"
SPEAKERS = "speakers.safetensors"  # the checkpoint's own voices


def version_directory(repository: Path, model: str) -> Path:
    """The folder that holds a model's artifacts."""
    return repository / model / VERSION


def artifacts(pipeline: Pipeline, profile: Profile = CPU) -> dict[str, str]:
    """What a profile serves, `CPU` what the export writes: model name -> file in its version directory."""
    graphs = {
        stage.name: profile.artifact_of(stage) for stage in pipeline.graph_stages if profile.serves(stage)
    }
    return graphs | {pipeline.text_frontend.name: TOKENIZER, pipeline.tts.name: SPEAKERS}


def skeleton(family: Family = COSYVOICE2) -> dict[str, str]:
    """Every committed file of the repository: relative path -> text."""
    from cosytriton_ensemble.config import configurations  # brings gRPC, which most models do without

    pipeline = pipeline_of(family)
    files: dict[str, str] = {}
    for model in (*pipeline.native_stages, *pipeline.python_stages, *pipeline.ensembles):
        files |= {f"{model.name}/{path}": text for path, text in configurations(model).items()}
        if isinstance(model, Stage) and model.backend == "python":
            files[f"{model.name}/{VERSION}/model.py"] = _model_py(model.name)
        else:
            # Triton wants a version directory, and git keeps no empty one.
            files[f"{model.name}/{VERSION}/.gitkeep"] = ""
    return files


def write_repository(repository: Path, family: Family = COSYVOICE2) -> None:
    """Write the skeleton of a family over that of another; artifacts that lie there already stay."""
    files = skeleton(family)
    for other in FAMILIES.values():
        for stale in skeleton(other).keys() - files.keys():
            (repository / stale).unlink(missing_ok=True)  # Triton would prefer it to `config.pbtxt`
    for name, text in files.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def check_repository(repository: Path, profile: Profile = CPU) -> None:
    """Refuse a repository unless it has every file that serving a profile needs, of one checkpoint.

    Raises:
        RepositoryError: What is missing or wrong (see `check_artifact`), and the command that mends it.

    """
    # Those of the smallest family are those that every family has; which one it is, they tell.
    _check_artifacts(repository, profile, COSYVOICE1)
    family = family_of(repository)
    served = _check_artifacts(repository, profile, family)
    remedy = f"Run `cosytriton repository {repository} --family {family.name}`."
    _check_presence(repository, {repository / name: remedy for name in _skeleton_of(family, profile)})
    _check_unity(repository, _artifact_paths(repository, CPU, family))
    for path in served:
        check_artifact(path)


def check_skeleton(repository: Path) -> None:
    """Refuse configurations and code that this version does not write so; RepositoryError names the file."""
    family = family_of(repository)
    for name, text in skeleton(family).items():
        path = repository / name
        if not path.name.startswith(".") and path.read_text(encoding="utf-8") != text:
            raise RepositoryError(
                f"{path} is not what this version writes. If it was changed on purpose, serve without "
                f"--verify; else run `cosytriton repository {repository} --family {family.name}`."
            )


def exported_files(repository: Path) -> list[Path]:
    """What tells one export from another: the manifests of its artifacts, its configurations and code."""
    family = family_of(repository)
    manifests = [manifest_path(path) for path in _artifact_paths(repository, CPU, family)]
    return manifests + [repository / name for name in sorted(skeleton(family))]


def native_manifests(repository: Path, profile: Profile) -> list[Manifest]:
    """Those of what Triton's own backends serve."""
    stages = pipeline_of(family_of(repository)).native_stages
    return [
        Manifest.read(version_directory(repository, stage.name) / profile.artifact_of(stage))
        for stage in stages
    ]


def _check_artifacts(repository: Path, profile: Profile, family: Family) -> list[Path]:
    paths = _artifact_paths(repository, profile, family)
    _check_presence(repository, {path: how_to_make(path) for path in paths})
    return paths


def _artifact_paths(repository: Path, profile: Profile, family: Family) -> list[Path]:
    names = artifacts(pipeline_of(family), profile)
    return [version_directory(repository, model) / name for model, name in names.items()]


def _skeleton_of(family: Family, profile: Profile) -> list[str]:
    """Its files, but for version directories and what configures other profiles."""
    others = tuple(other.config_file for other in PROFILES.values() if other not in (profile, CPU))
    return [name for name in skeleton(family) if not name.endswith((".gitkeep", *others))]


def _check_presence(repository: Path, remedies: Mapping[Path, str]) -> None:
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for path, remedy in remedies.items():
        if not path.is_file():
            missing[remedy].append(str(path.relative_to(repository)))
    if missing:
        lists = (f"lacks {', '.join(sorted(names))}. {remedy}" for remedy, names in missing.items())
        raise RepositoryError(f"The model repository {repository} {' It '.join(lists)}")


def _check_unity(repository: Path, exported: Iterable[Path]) -> None:
    models = {Manifest.read(path).checkpoint: path.parents[1].name for path in exported}
    if len(models) > 1:
        raise RepositoryError(
            f"The model repository {repository} mixes {len(models)} checkpoints (see the manifests of "
            f"{', '.join(sorted(models.values()))}). Export one of them again, whole."
        )


def family_of(repository: Path) -> Family:
    """The family of the checkpoint that the repository was exported from."""
    return family_named(identity_of(repository).family)


def checkpoint_of(repository: Path) -> str:
    """The identity of the checkpoint that the repository was exported from, `family:hash`."""
    manifest = identity_of(repository)
    return f"{manifest.family}:{manifest.checkpoint}"


def is_untrained(repository: Path) -> bool:
    """Whether the repository was exported from random weights, so that its sound is noise."""
    return identity_of(repository).untrained


def _model_py(name: str) -> str:
    return (
        f'"""Triton loads the model `{name}` from here; its code is in `cosytriton_ensemble.models`."""\n\n'
        f"from cosytriton_ensemble.models.{name} import TritonPythonModel\n\n"
        '__all__ = ["TritonPythonModel"]\n'
    )
