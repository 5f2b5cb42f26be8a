"""Triton's model repository: which files it has, how its skeleton is written, what must lie in it.

<repository>/<model>/config.pbtxt   profile `cpu`
                     1/model.py     Python models: one import
                     1/model.onnx   native stages and speech_lm: written by the export
                     1/manifest.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cosytriton_ensemble.config import DEFAULT_MODEL, config_text
from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE2, Family, family_named
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.spec import Stage

VERSION = "1"
TOKENIZER = "tokenizer.json"
SPEAKERS = "speakers.safetensors"  # the checkpoint's own voices
MANIFEST = "manifest.json"


def version_directory(repository: Path, model: str) -> Path:
    """The folder that holds a model's artifacts."""
    return repository / model / VERSION


def artifacts(pipeline: Pipeline) -> dict[str, str]:
    """What the export writes: model name -> file name in its version directory."""
    native = {stage.name: DEFAULT_MODEL for stage in pipeline.native_stages}
    return native | {
        pipeline.speech_lm.name: DEFAULT_MODEL,
        pipeline.text_frontend.name: TOKENIZER,
        pipeline.tts.name: SPEAKERS,
    }


def skeleton(family: Family = COSYVOICE2) -> dict[str, str]:
    """Every committed file of the repository: relative path -> text."""
    pipeline = pipeline_of(family)
    files: dict[str, str] = {}
    for model in (*pipeline.native_stages, *pipeline.python_stages, *pipeline.ensembles):
        files[f"{model.name}/config.pbtxt"] = config_text(model)
        if isinstance(model, Stage) and model.backend == "python":
            files[f"{model.name}/{VERSION}/model.py"] = _model_py(model.name)
        else:
            # Triton wants a version directory, and git keeps no empty one.
            files[f"{model.name}/{VERSION}/.gitkeep"] = ""
    return files


def write_repository(repository: Path, family: Family = COSYVOICE2) -> None:
    """Write the skeleton of a family; artifacts that lie there already stay."""
    for name, text in skeleton(family).items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def check_repository(repository: Path) -> None:
    """Raise RepositoryError unless `repository` has every file that serving needs, of one checkpoint."""
    manifests = sorted(repository.glob(f"*/{VERSION}/{MANIFEST}"))
    family = family_of(repository) if manifests else COSYVOICE2
    wanted = [repository / name for name in skeleton(family) if not name.endswith(".gitkeep")]
    files = artifacts(pipeline_of(family))
    wanted += [version_directory(repository, model) / name for model, name in files.items()]
    missing = sorted(str(path.relative_to(repository)) for path in wanted if not path.is_file())
    if missing:
        raise RepositoryError(
            f"The model repository {repository} lacks {', '.join(missing)}. "
            f"Run `cosytriton export CHECKPOINT --repository {repository}` first."
        )
    checkpoints = {_manifest(path)["checkpoint"]: path.parent.parent.name for path in manifests}
    if len(checkpoints) > 1:
        raise RepositoryError(
            f"The model repository {repository} mixes {len(checkpoints)} checkpoints (see the manifests of "
            f"{', '.join(sorted(checkpoints.values()))}). Export one of them again, whole."
        )


def family_of(repository: Path) -> Family:
    """The family of the checkpoint that the repository was exported from."""
    return family_named(str(_flow_manifest(repository)["family"]))


def checkpoint_of(repository: Path) -> str:
    """The identity of the checkpoint that the repository was exported from, `family:hash`."""
    manifest = _flow_manifest(repository)
    return f"{manifest['family']}:{manifest['checkpoint']}"


def is_untrained(repository: Path) -> bool:
    """Whether the repository was exported from random weights, so that its sound is noise."""
    return bool(_flow_manifest(repository)["untrained"])


def _flow_manifest(repository: Path) -> dict[str, Any]:
    return _manifest(version_directory(repository, pipeline_of(COSYVOICE2).flow.name) / MANIFEST)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RepositoryError(
            f"The manifest {path} cannot be read ({error}). Export the checkpoint again."
        ) from error
    return manifest


def _model_py(name: str) -> str:
    return (
        f'"""Triton loads the model `{name}` from here; its code is in `cosytriton_ensemble.models`."""\n\n'
        f"from cosytriton_ensemble.models.{name} import TritonPythonModel\n\n"
        '__all__ = ["TritonPythonModel"]\n'
    )
