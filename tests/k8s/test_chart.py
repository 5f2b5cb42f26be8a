"""The Helm chart by its defaults and one feature at a time: what its manifests promise is there."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from cosytriton_client.voices_command import VOICES
from cosytriton_ensemble.commands import HEALTH, SERVE

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
ENGINES = ("profile=gpu_fp16", "engines.enabled=true", "engines.claim=engines", "gpu.products[0]=NVIDIA-H200")


def parsed(command: Any, words: list[str]) -> argparse.Namespace:
    """The words as the console command understands them; unknown options end the test."""
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return parser.parse_args(words)


def volume(pod: Any, name: str) -> Any:
    (found,) = [one for one in pod["volumes"] if one["name"] == name]
    return {key: value for key, value in found.items() if key != "name"}


def mounts(container: Any) -> dict[str, Any]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def test_lint(run_helm: Any) -> None:
    done = run_helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("cosytriton")


def test_the_server_is_started_with_options_that_it_has(render: Any) -> None:
    server = render("profile=cpu_int8", "gpu.count=0", "threads=3", "logLevel=info").server
    assert server["command"] == ["cosytriton", "serve"]
    options = parsed(SERVE, server["args"])
    assert (options.profile, options.host, options.threads) == ("cpu_int8", "0.0.0.0", 3)
    assert (str(options.repository), options.log_level) == ("/models", "info")
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": options.grpc_port, "metrics": options.metrics_port}


@pytest.mark.parametrize(("probe", "speaks"), [("startup", True), ("readiness", False), ("liveness", False)])
def test_probes_are_inference_with_a_deadline(render: Any, probe: str, speaks: bool) -> None:
    settings = render().server[f"{probe}Probe"]
    program, subcommand, *words = settings["exec"]["command"]
    assert (program, subcommand) == ("cosytriton", "health")
    options = parsed(HEALTH, words)
    assert (options.url, options.ready) == ("localhost:8001", speaks)
    assert options.deadline < settings["timeoutSeconds"]


def test_a_hung_model_is_noticed_within_45_seconds(render: Any) -> None:
    probe = render().server["livenessProbe"]
    assert probe["periodSeconds"] + probe["failureThreshold"] * probe["timeoutSeconds"] < 45


def test_startup_may_take_as_long_as_it_is_allowed(render: Any) -> None:
    probe = render("probes.startupSeconds=104").server["startupProbe"]
    assert 104 <= probe["periodSeconds"] * probe["failureThreshold"] < 104 + probe["periodSeconds"]


@pytest.mark.parametrize("settings", [(), ("longestRequestSeconds=900", "drainSeconds=25")])
def test_the_longest_request_may_finish(render: Any, settings: tuple[str, ...]) -> None:
    manifests = render(*settings)
    drain = manifests.server["lifecycle"]["preStop"]["sleep"]["seconds"]
    finish = parsed(SERVE, manifests.server["args"]).exit_timeout
    assert (drain, finish) == ((25, 900) if settings else (10, 120))
    assert drain + finish < manifests.pod["terminationGracePeriodSeconds"]


def test_a_longer_grace_period_is_given_to_the_requests(render: Any) -> None:
    manifests = render("terminationGracePeriodSeconds=600")
    assert manifests.pod["terminationGracePeriodSeconds"] == 600
    assert parsed(SERVE, manifests.server["args"]).exit_timeout == 580


def test_no_token_in_any_pod(render: Any) -> None:
    manifests = render(*ENGINES)
    account = manifests.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    for pod in manifests.pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["serviceAccountName"] == account["metadata"]["name"]


def test_what_is_written_has_a_volume(render: Any) -> None:
    manifests = render()
    found = mounts(manifests.server)
    assert set(found) == {"/models", "/dev/shm", "/tmp"}
    assert found["/models"]["readOnly"] is True
    claim = {"claimName": "cosytriton-models", "readOnly": True}
    assert volume(manifests.pod, "models") == {"persistentVolumeClaim": claim}
    assert volume(manifests.pod, "shm") == {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}


def test_models_are_verified_unless_it_is_switched_off(render: Any) -> None:
    assert "--verify" in render().server["args"]
    assert "--verify" not in render("models.verify=false").server["args"]


def test_models_come_from_an_object_store(render: Any) -> None:
    store = ("models.source=objectStore", "models.objectStore.path=s3:tts/v2", "networkPolicy.enabled=false")
    pod = render(*store, "models.objectStore.secret=s3").pod
    (fetch,) = pod["initContainers"]
    assert fetch["command"][:2] == ["rclone", "copy"]
    assert fetch["command"][-2:] == ["s3:tts/v2", "/models"]
    assert "--checksum" in fetch["command"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert volume(pod, "models") == {"emptyDir": {"sizeLimit": "20Gi"}}
    assert "readOnly" not in mounts(fetch)["/models"]
    assert mounts(pod["containers"][0])["/models"]["readOnly"] is True


def test_models_come_as_an_image_volume(render: Any) -> None:
    image = ("models.source=image", "models.image.reference=registry/models@sha256:00")
    manifests = render(*image, "models.image.subPath=repository")
    source = {"reference": "registry/models@sha256:00", "pullPolicy": "IfNotPresent"}
    assert volume(manifests.pod, "models") == {"image": source}
    assert mounts(manifests.server)["/models"]["subPath"] == "repository"


def test_weights_are_in_no_config_map(render: Any) -> None:
    for manifest in render("metrics.dashboard=true").all("ConfigMap"):
        assert all(name.endswith(".json") for name in manifest["data"])
        assert sum(map(len, manifest["data"].values())) < 1 << 20


@pytest.mark.parametrize("read_only", [False, True])
def test_voices_lie_where_the_server_reads_them(render: Any, read_only: bool) -> None:
    settings = ("voices.claim=people", "voices.subPath=enrolled", f"voices.readOnly={str(read_only).lower()}")
    manifests = render(*settings)
    mount = mounts(manifests.server)["/voices"]
    claim = {"claimName": "people", "readOnly": read_only}
    assert volume(manifests.pod, "voices") == {"persistentVolumeClaim": claim}
    assert (mount["subPath"], mount["readOnly"]) == ("enrolled", read_only)
    assert str(parsed(SERVE, manifests.server["args"]).voices) == mount["mountPath"]


def test_without_a_claim_there_are_no_voices(render: Any) -> None:
    assert parsed(SERVE, render().server["args"]).voices is None


def test_a_claim_of_one_pod_is_left_before_it_is_taken(render: Any) -> None:
    settings = ("voices.claim=people", "voices.accessMode=ReadWriteOnce")
    assert render(*settings).one("Deployment")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("settings", "enrols"),
    [((), False), (("claim=people",), True), (("claim=people", "readOnly=true"), False)],
)
def test_notes_tell_how_to_enrol_where_it_works(
    run_helm: Any, settings: tuple[str, ...], enrols: bool
) -> None:
    options = [word for setting in settings for word in ("--set", f"voices.{setting}")]
    notes = run_helm("install", "demo", str(CHART), "--dry-run=client", *options).stdout
    found = re.findall(r"cosytriton voices (add .*)' <", notes)
    assert len(found) == enrols
    for words in found:
        command = parsed(VOICES, shlex.split(words))
        assert (command.action, str(command.voices)) == ("add", "/voices")


def test_notes_name_the_service(run_helm: Any) -> None:
    done = run_helm("install", "demo", str(CHART), "--dry-run=client", "--namespace", "speech")
    assert done.returncode == 0, done.stderr
    assert "port-forward service/demo-cosytriton 8001" in done.stdout
    assert "demo-cosytriton.speech:8001" in done.stdout


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-1g.12gb", "nvidia.com/gpu.shared"])
def test_the_gpu_by_its_name_and_product(render: Any, resource: str) -> None:
    name = resource.replace(".", r"\.")
    manifests = render(f"gpu.resource={name}", "gpu.products={NVIDIA-H200,NVIDIA-L40S}")
    assert manifests.server["resources"]["limits"] == {"memory": "16Gi", resource: 1}
    affinity = manifests.pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["nodeSelectorTerms"]
    expected = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200", "NVIDIA-L40S"]}
    assert term["matchExpressions"] == [expected]


def test_a_profile_of_the_cpu_takes_no_gpu(render: Any) -> None:
    assert render("profile=cpu", "gpu.count=0").server["resources"]["limits"] == {"memory": "16Gi"}


def test_where_pods_may_stand(render: Any) -> None:
    settings = ("priorityClass=speech", "gpu.runtimeClass=nvidia", "nodeSelector.pool=gpu")
    pod = render(*settings, "tolerations[0].key=nvidia.com/gpu", "tolerations[0].operator=Exists").pod
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("speech", "nvidia")
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize(("required", "when"), [("false", "ScheduleAnyway"), ("true", "DoNotSchedule")])
def test_pods_stand_apart(render: Any, required: str, when: str) -> None:
    manifests = render(f"spread.required={required}")
    (spread,) = manifests.pod["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", when)
    labels = manifests.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(("enabled", "ports"), [("false", {8001, 8002}), ("true", {8000, 8001, 8002})])
def test_http_only_if_enabled(render: Any, enabled: str, ports: set[int]) -> None:
    manifests = render(f"http.enabled={enabled}")
    assert {port["containerPort"] for port in manifests.server["ports"]} == ports
    assert {port["port"] for port in manifests.one("Service")["spec"]["ports"]} == ports - {8002}
    assert ("--http-host=0.0.0.0" in manifests.server["args"]) == (enabled == "true")


def test_tls_and_the_admin_key_come_from_secrets(render: Any) -> None:
    manifests = render("tls.secret=certificate", "tls.mutual=true", "admin.secret=admin")
    options = parsed(SERVE, manifests.server["args"])
    assert (str(options.tls), options.mutual_tls) == ("/tls", True)
    assert str(options.admin_key) == "/admin/admin-key"
    assert volume(manifests.pod, "tls")["secret"]["secretName"] == "certificate"
    assert volume(manifests.pod, "admin")["secret"]["secretName"] == "admin"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        _, _, *words = manifests.server[probe]["exec"]["command"]
        assert str(parsed(HEALTH, words).tls) == "/tls"
    assert "env" not in manifests.server  # no secret is a variable


def test_tls_of_the_server_alone(render: Any) -> None:
    options = parsed(SERVE, render("tls.secret=certificate").server["args"])
    assert (str(options.tls), options.mutual_tls, options.admin_key) == ("/tls", False, None)


def test_traces_go_to_the_collector(render: Any) -> None:
    endpoint = "http://collector.monitoring:4318/v1/traces"
    manifests = render(f"tracing.endpoint={endpoint}", "tracing.rate=50")
    settings = parsed(SERVE, manifests.server["args"]).trace_config
    assert {"mode=opentelemetry", f"opentelemetry,url={endpoint}", "rate=50"} <= set(settings)
    rules = manifests.one("NetworkPolicy")["spec"]["egress"]
    assert [{"port": 4318}] in [rule["ports"] for rule in rules]


def test_a_digest_pins_the_image(render: Any) -> None:
    digest = "sha256:" + 64 * "a"
    assert render(f"image.digest={digest}", "image.tag:=1").server["image"] == f"cosytriton:1@{digest}"
