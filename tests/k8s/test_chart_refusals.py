"""Values that contradict one another are refused, and faults of the chart itself are noticed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

CHART = Path(__file__).parents[2] / "k8s" / "cosytriton"
KUBERNETES = "1.37"
FP16 = ("profile=gpu_fp16", "engines.enabled=true", "engines.claim=engines")
VOICES = ("voices.claim=people", "voices.accessMode=ReadWriteOnce")
HPA = "autoscaling.kind=hpa"
PROMETHEUS = ("autoscaling.kind=keda", "autoscaling.prometheus=http://prometheus:9090")
KEDA = (*PROMETHEUS, "metrics.monitor=PodMonitor")
GATEWAY = ("gateway.enabled=true", "gateway.parent=public")
INGRESS = ("ingress.enabled=true", "ingress.host=a.b")
TLS = ("tls.secret=t", "tls.mutual=true")

CONTRADICTIONS = [
    (("gpu.count=0",), "profile gpu computes on a GPU, but gpu.count is 0"),
    (("profile=cpu",), "leaves its GPU idle"),
    (("gpu.count=2", "gpu.resource=nvidia.com/mig-1g.12gb"), "one MIG slice or shared GPU"),
    (("gpu.count=2", "gpu.resource=nvidia.com/gpu.shared"), "one MIG slice or shared GPU"),
    (("models.source=objectStore",), "models.objectStore.path"),
    (("models.source=objectStore", "models.objectStore.path=s3:a/b"), "networkPolicy.egress"),
    (("models.source=image",), "models.image.reference"),
    (("engines.enabled=true", "engines.claim=e"), "profile gpu does not serve"),
    (("profile=gpu_fp16", "engines.enabled=true"), "engines.claim"),
    (FP16, "gpu.products has 0"),
    ((*FP16, "gpu.products={A,B}"), "gpu.products has 2"),
    (("engines.key=a",), "give engines.enabled"),
    (("disaggregated.part=sound",), "needs the address"),
    (("disaggregated.lmUrl=a:8001",), "the others have none"),
    (("disaggregated.part=lm", *GATEWAY), "speaks to no client"),
    (("disaggregated.part=lm", *INGRESS), "speaks to no client"),
    ((*VOICES, "replicas=2"), "there may be several"),
    ((*VOICES, HPA), "there may be several"),
    ((*VOICES, "workload=Rollout"), "starts new pods beside the old ones"),
    (("voices.claim=people", "voices.accessMode=ReadOnlyMany"), "nobody can enrol"),
    (("terminationGracePeriodSeconds=139",), "are 140"),
    (("terminationGracePeriodSeconds=200", "longestRequestSeconds=600"), "cuts requests off"),
    (("update.maxSurge=0",), "no upgrade could begin"),
    ((HPA, "replicas=2"), "two masters"),
    ((HPA, "workload=InferenceService"), "belongs to KServe"),
    ((HPA, "autoscaling.minReplicas=9"), "above maxReplicas"),
    ((HPA, "autoscaling.minReplicas=0"), "no metrics that wake one"),
    ((*KEDA, "autoscaling.minReplicas=0"), "no metrics that wake one"),
    (("autoscaling.kind=keda",), "autoscaling.prometheus"),
    (PROMETHEUS, "the release's own monitor"),
    (("tls.mutual=true",), "tls.secret"),
    (("gateway.enabled=true",), "gateway.parent"),
    ((*GATEWAY, "tls.secret=t"), "listener ends TLS"),
    ((*GATEWAY, "gateway.canary.weight=10"), "names nobody"),
    (("gateway.canary.service=next",), "gateway.enabled"),
    ((*GATEWAY, "gateway.canary.service=next", "workload=Rollout"), "both move weights"),
    (("ingress.enabled=true",), "ingress.host"),
    ((*INGRESS, *TLS), "cannot show the clients' certificates"),
    (("workload=Rollout", "rollout.prometheus=http://p:9090"), "metrics.monitor"),
]


@pytest.mark.parametrize(("settings", "reason"), CONTRADICTIONS)
def test_a_contradiction_is_refused(template: Any, settings: tuple[str, ...], reason: str) -> None:
    done = template(*settings)
    assert done.returncode != 0
    assert reason in " ".join(done.stderr.split())


def test_every_refusal_is_tried() -> None:
    assert len(CONTRADICTIONS) >= (CHART / "templates" / "checks.yaml").read_text().count("fail ")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replica=2", "replica"),
        ("http.enable=true", "enable"),
        ("image.tags=x", "tags"),
        ("resources.limit.cpu=1", "limit"),
        ("profile=gpu_fp8", "profile"),
        ("models.claim.name=", "name"),
        ("voices.subPath=/voices", "subPath"),
        ("sharedMemory=2GB", "sharedMemory"),
        ("gateway.canary.weight=101", "weight"),
        ("replicas=null", "replicas"),
    ],
)
def test_helm_refuses_a_misspelt_or_wrong_value(template: Any, setting: str, named: str) -> None:
    done = template(setting)
    assert done.returncode != 0
    assert named in done.stderr


def broken(folder: Path, template: str, right: str, wrong: str) -> Path:
    """A copy of the chart with one fault in it."""
    chart = folder / "cosytriton"
    shutil.copytree(CHART, chart)
    path = chart / "templates" / template
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    return chart


@pytest.mark.parametrize(
    ("template_file", "right", "wrong"),
    [
        ("_pod.tpl", "terminationGracePeriodSeconds:", "terminationGracePeriod:"),
        ("_server.tpl", "failureThreshold:", "failureTreshold:"),
        ("_server.tpl", "containerPort: 8001", 'containerPort: "8001"'),
    ],
)
def test_a_misspelt_field_is_noticed(
    template: Any, check: Any, load: Any, tmp_path: Path, template_file: str, right: str, wrong: str
) -> None:
    manifests = load(template(chart=broken(tmp_path, template_file, right, wrong)))
    with pytest.raises(kubernetes_validate.ValidationError):
        check(manifests.one("Deployment"), KUBERNETES)


def test_a_removed_version_is_noticed(template: Any, check: Any, load: Any, tmp_path: Path) -> None:
    chart = broken(tmp_path, "hpa.yaml", "autoscaling/v2", "autoscaling/v2beta2")
    manifests = load(template(HPA, chart=chart))
    with pytest.raises(AssertionError, match="No schema covers autoscaling v2beta2"):
        check(manifests.one("HorizontalPodAutoscaler"), KUBERNETES)


def test_an_unknown_kind_is_noticed(check: Any) -> None:
    with pytest.raises(AssertionError, match="No schema covers example.org v1 Speech"):
        check({"apiVersion": "example.org/v1", "kind": "Speech", "metadata": {"name": "a"}}, KUBERNETES)


@pytest.mark.chart
@pytest.mark.parametrize(
    ("settings", "file", "kind", "right", "wrong"),
    [
        (
            KEDA,
            "scaledobject.yaml",
            "ScaledObject",
            "maxReplicaCount: {{ .maxReplicas }}",
            "maxReplicaCount: many",
        ),
        (GATEWAY, "grpcroute.yaml", "GRPCRoute", "port: 8001", "port: grpc"),
        (("workload=Rollout",), "rollout.yaml", "Rollout", "- setWeight: {{ . }}", "- setWeight: much"),
        (("metrics.rules=true",), "rules.yaml", "PrometheusRule", "spec:", "spec:\n  groups: none\nunused:"),
    ],
)
def test_a_wrong_custom_resource_is_noticed(
    template: Any,
    check: Any,
    load: Any,
    tmp_path: Path,
    settings: tuple[str, ...],
    file: str,
    kind: str,
    right: str,
    wrong: str,
) -> None:
    manifests = load(template(*settings, chart=broken(tmp_path, file, right, wrong)))
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check(manifests.one(kind), KUBERNETES)
