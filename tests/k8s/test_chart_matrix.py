"""Every combination of features against three versions of Kubernetes, and every value against dead ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VERSIONS = ("1.35", "1.36", "1.37")

pytestmark = pytest.mark.chart


def test_the_versions_have_schemas_of_their_own() -> None:
    """For a version that it does not know, the validator silently takes an older one."""
    known = {version.rsplit(".", 1)[0] for version in kubernetes_validate.utils.all_versions()}
    assert set(VERSIONS) <= known


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cluster_takes_every_manifest(
    render: Any, check: Any, combination: tuple[str, ...], version: str
) -> None:
    manifests = render(*combination)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(names) == len(set(names))
    assert all(m["metadata"]["namespace"] == "speech" for m in manifests)
    for manifest in manifests:
        check(manifest, version)


def test_lint_takes_every_combination(run_helm: Any, combination: tuple[str, ...]) -> None:
    options = [word for setting in combination for word in ("--set", setting)]
    done = run_helm("lint", "--strict", "--quiet", str(CHART), *options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_is_in_the_matrix(render: Any, combinations: list[tuple[str, ...]]) -> None:
    """A template that no combination renders would never be checked."""
    rendered = {kind for settings in combinations for kind in render(*settings).kinds}
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*.yaml"))
    written = {line.split()[1] for line in text.splitlines() if line.startswith("kind: ")} - {"{{"}
    assert written | {"PodMonitor", "ServiceMonitor"} == rendered


# Values in whose company the others mean something. One of these must be rendered differently.
COMPANY = (
    ("models.image.reference=a/b", "gateway.parent=public"),
    (
        "profile=gpu_fp16",
        "engines.enabled=true",
        "engines.claim=engines",
        "gpu.products[0]=NVIDIA-H200",
        "voices.claim=people",
        "tls.secret=certificate",
        "admin.secret=admin",
        "ingress.enabled=true",
        "ingress.host=a.b",
        "tracing.endpoint=http://collector:4318/v1/traces",
        "metrics.monitor=PodMonitor",
        "metrics.rules=true",
        "metrics.dashboard=true",
        "autoscaling.kind=hpa",
    ),
    (
        "models.source=objectStore",
        "models.objectStore.path=s3:tts/v2",
        "networkPolicy.egress[0].to[0].ipBlock.cidr=10.0.0.0/8",
        "gateway.enabled=true",
        "gateway.parent=public",
        "gateway.canary.service=next",
        "autoscaling.kind=keda",
        "autoscaling.prometheus=http://prometheus:9090",
        "metrics.monitor=PodMonitor",
    ),
    (
        "models.source=image",
        "models.image.reference=a/b",
        "workload=Rollout",
        "rollout.prometheus=http://prometheus:9090",
        "metrics.monitor=ServiceMonitor",
    ),
    (
        "disaggregated.part=sound",
        "disaggregated.lmUrl=lm:8001",
        "voices.claim=people",
        "tls.secret=certificate",
    ),
    (
        "autoscaling.kind=keda",
        "autoscaling.prometheus=http://prometheus:9090",
        "metrics.monitor=PodMonitor",
        "autoscaling.minReplicas=0",
        "autoscaling.wakeQuery=up",
    ),
)
OTHERS: dict[str, Any] = {  # where neither the type nor the default tells of another value that fits
    "image.digest": "sha256:" + 64 * "0",
    "models.objectStore.path": "gcs:other",
    "tracing.endpoint": "http://other:4318",
    "rollout.prometheus": "http://other:9090",
    "autoscaling.prometheus": "http://other:9090",
    "disaggregated.lmUrl": "other:8001",
    "terminationGracePeriodSeconds": 7000,
    "rollout.weights": [7],
    "imagePullSecrets": [{"name": "other"}],
    "gateway.hostnames": ["other.example.org"],
    "gpu.products": ["other"],
    "networkPolicy.egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}],
    "networkPolicy.clients": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    "networkPolicy.scrapers": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    "tolerations": [{"key": "other"}],
    "gpu.resource": "nvidia.com/other",
}


def leaves(schema: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every value that is no group of others, with its schema."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    if "properties" not in schema:
        return [(path, schema)]
    named = schema["properties"].items()
    return [leaf for name, child in named if name != "global" for leaf in leaves(child, (*path, name))]


LEAVES = dict(leaves(SCHEMA))


def others(path: tuple[str, ...], schema: Any) -> list[Any]:
    """Values to try: the default, from which the company may differ, and such as differ from it."""
    value: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in path:
        value = value[name]
    if (name := ".".join(path)) in OTHERS:
        return [value, OTHERS[name]]
    if "enum" in schema:
        return list(schema["enum"])
    if isinstance(value, bool):
        return [value, not value]
    if isinstance(value, int):
        return [value, value + 1]
    if isinstance(value, dict):
        return [value, {"other": "7Gi" if path[-1] in ("requests", "limits") else "a"}]
    return [value, "7Gi", "other"]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_no_value_is_dead(template: Any, path: tuple[str, ...]) -> None:
    """Changing it alone changes what is rendered, in some company."""
    for settings in COMPANY:
        before = template(*settings)
        assert before.returncode == 0, before.stderr
        for value in others(path, LEAVES[path]):
            name = ".".join(path)
            company = [one for one in settings if not one.startswith(f"{name}=")]
            after = template(*company, f"{name}::={json.dumps(value)}")
            if after.returncode == 0 and after.stdout != before.stdout:
                return
    pytest.fail(f"{'.'.join(path)} changes nothing")
