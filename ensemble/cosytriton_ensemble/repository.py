"""Triton's model repository: which files it has, how its skeleton is written, what must lie in it.

<repository>/<model>/config.pbtxt   profile `cpu`
                     1/model.py     Python models: one import
                     1/model.onnx   native stages and speech_lm: written by the export
                     1/manifest.json
"""

from __future__ import annotations

import json
from pathlib import Path

from cosytriton_ensemble.config import DEFAULT_MODEL, config_text
from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.pipeline import (
    ENSEMBLES,
    FLOW,
    NATIVE_STAGES,
    PYTHON_STAGES,
    SPEECH_LM,
    TEXT_FRONTEND,
)
from cosytriton_ensemble.spec import Stage

VERSION = "1"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"


def version_directory(repository: Path, model: str) -> Path:
    """The folder that holds a model's artifacts."""
    return repository / model / VERSION


def artifacts() -> dict[str, str]:
    """What the export writes: model name -> file name in its version directory."""
    native = {stage.name: DEFAULT_MODEL for stage in NATIVE_STAGES}
    return native | {SPEECH_LM.name: DEFAULT_MODEL, TEXT_FRONTEND.name: TOKENIZER}


def skeleton() -> dict[str, str]:
    """Every committed file of the repository: relative path -> text."""
    files: dict[str, str] = {}
    for model in (*NATIVE_STAGES, *PYTHON_STAGES, *ENSEMBLES):
        files[f"{model.name}/config.pbtxt"] = config_text(model)
        if isinstance(model, Stage) and model.backend == "python":
            files[f"{model.name}/{VERSION}/model.py"] = _model_py(model.name)
        else:
            # Triton wants a version directory, and git keeps no empty one.
            files[f"{model.name}/{VERSION}/.gitkeep"] = ""
    return files


def write_repository(repository: Path) -> None:
    """Write the skeleton; artifacts that lie there already stay."""
    for name, text in skeleton().items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def check_repository(repository: Path) -> None:
    """Raise RepositoryError unless every file that serving needs lies in `repository`."""
    wanted = [repository / name for name in skeleton() if not name.endswith(".gitkeep")]
    wanted += [version_directory(repository, model) / name for model, name in artifacts().items()]
    missing = sorted(str(path.relative_to(repository)) for path in wanted if not path.is_file())
    if missing:
        raise RepositoryError(
            f"The model repository {repository} lacks {', '.join(missing)}. "
            f"Run `cosytriton export CHECKPOINT --repository {repository}` first."
        )


def is_untrained(repository: Path) -> bool:
    """Whether the repository was exported from random weights, so that its sound is noise."""
    manifest = version_directory(repository, FLOW.name) / MANIFEST
    return manifest.is_file() and bool(json.loads(manifest.read_text(encoding="utf-8"))["untrained"])


def _model_py(name: str) -> str:
    return (
        f'"""Triton loads the model `{name}` from here; its code is in `cosytriton_ensemble.models`."""\n\n'
        f"from cosytriton_ensemble.models.{name} import TritonPythonModel\n\n"
        '__all__ = ["TritonPythonModel"]\n'
    )
