"""What surrounds the server's pods in the chart: engines, balancing, scaling, canaries, metrics, the test."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cosytriton_engines.commands import BUILD
from cosytriton_ensemble.commands import HEALTH, SERVE
from cosytriton_ensemble.server import free_ports

FILES = Path(__file__).parents[2] / "k8s" / "cosytriton" / "files"
ENGINES = ("profile=gpu_fp16", "engines.enabled=true", "engines.claim=engines", "gpu.products[0]=NVIDIA-H200")
GATEWAY = ("gateway.enabled=true", "gateway.parent=public")
PROMETHEUS = "http://prometheus:9090"
KEDA = ("autoscaling.kind=keda", f"autoscaling.prometheus={PROMETHEUS}", "metrics.monitor=PodMonitor")
ROLLOUT = ("workload=Rollout", f"rollout.prometheus={PROMETHEUS}", "metrics.monitor=PodMonitor")


def parsed(command: Any, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return parser.parse_args(words)


# Engines


def test_a_job_builds_the_engines_on_the_gpu_that_serves_them(render: Any) -> None:
    manifests = render(*ENGINES)
    (job,) = manifests.all("Job")
    pod = job["spec"]["template"]["spec"]
    (build,) = pod["containers"]
    assert build["command"] == ["cosytriton", "build"]
    options = parsed(BUILD, build["args"])
    assert (options.profile, str(options.engines), options.wait) == (["gpu_fp16"], "/engines", False)
    assert pod["affinity"] == manifests.pod["affinity"]
    assert build["image"] == manifests.server["image"]
    assert build["resources"]["limits"]["nvidia.com/gpu"] == 1
    writable = {m["mountPath"] for m in build["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/engines", "/tmp"}


def test_pods_wait_for_the_engines_of_their_gpu(render: Any) -> None:
    manifests = render(
        *ENGINES, "engines.key=nvidia-h200_trt-10.14.1_cosyvoice2-0123", "engines.waitSeconds=900"
    )
    (wait,) = manifests.pod["initContainers"]
    limit, seconds, program = wait["command"]
    assert (limit, seconds, program, wait["args"][0]) == ("timeout", "900", "cosytriton", "build")
    waiting, serving = parsed(BUILD, wait["args"][1:]), parsed(SERVE, manifests.server["args"])
    assert waiting.wait
    assert waiting.engines == serving.engines == Path("/engines")
    assert waiting.repository == serving.repository
    assert serving.engine_key == "nvidia-h200_trt-10.14.1_cosyvoice2-0123"
    assert wait["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert manifests.one("Deployment")["spec"]["progressDeadlineSeconds"] > 900


def test_another_build_is_another_job(render: Any) -> None:
    """A Job's pod cannot be changed, so that an upgrade must not try to."""
    first, same, other = (
        render(*ENGINES, *more).all("Job")[0]["metadata"]["name"]
        for more in ((), ("replicas=3",), ("engines.resources.limits.memory=64Gi",))
    )
    assert first == same != other


def test_the_job_is_no_server(render: Any) -> None:
    """Neither Services nor the disruption budget may count pods of the Job and the test."""
    manifests = render(*ENGINES)
    selector = manifests.one("Service")["spec"]["selector"]
    for labels in (
        manifests.all("Job")[0]["spec"]["template"]["metadata"]["labels"],
        manifests.one("Pod", "-test")["metadata"]["labels"],
    ):
        assert not selector.items() <= labels.items()


# Language model and sound apart


def test_the_language_model_may_have_pods_of_its_own(render: Any) -> None:
    model = render("disaggregated.part=lm")
    sound = render("disaggregated.part=sound", "disaggregated.lmUrl=lm-cosytriton:8001")
    assert parsed(SERVE, model.server["args"]).part == "lm"
    options = parsed(SERVE, sound.server["args"])
    assert (options.part, options.lm_url) == ("sound", "lm-cosytriton:8001")
    ports = [rule["ports"] for rule in sound.one("NetworkPolicy")["spec"]["egress"]]
    assert [{"port": 8001}] in ports
    (test,) = model.one("Pod", "-test")["spec"]["containers"]
    assert parsed(HEALTH, [*test["command"][2:], *test["args"]]).ready


# Balancing


def test_services_reach_the_server_alone(render: Any) -> None:
    manifests = render()
    deployment = manifests.one("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    ports = {"": {"grpc"}, "-headless": {"grpc"}, "-metrics": {"metrics"}}
    for suffix, names in ports.items():
        service = manifests.one("Service", suffix)["spec"]
        assert service["selector"] == deployment["selector"]["matchLabels"]
        assert service["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["ports"]} == names
        assert (service.get("clusterIP") == "None") == bool(suffix)


def test_proxies_know_that_the_port_speaks_http2(render: Any) -> None:
    assert render().one("Service")["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"
    assert "appProtocol" not in render("tls.secret=t").one("Service")["spec"]["ports"][0]


@pytest.mark.parametrize("weight", [0, 10, 100])
def test_a_second_release_gets_its_share(render: Any, weight: int) -> None:
    canary = ("gateway.canary.service=next-cosytriton", f"gateway.canary.weight={weight}")
    route = render(*GATEWAY, *canary, "gateway.hostnames={speech.example.org}").one("GRPCRoute")["spec"]
    (rule,) = route["rules"]
    assert {ref["name"]: ref["weight"] for ref in rule["backendRefs"]} == {
        "demo-cosytriton": 100 - weight,
        "next-cosytriton": weight,
    }
    assert route["parentRefs"] == [{"name": "public"}]
    assert route["hostnames"] == ["speech.example.org"]


def test_a_route_leads_to_the_release_alone_without_a_canary(render: Any) -> None:
    (rule,) = render(*GATEWAY).one("GRPCRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "demo-cosytriton", "port": 8001, "weight": 100}]


@pytest.mark.parametrize(("settings", "protocol"), [((), "GRPC"), (("tls.secret=t",), "GRPCS")])
def test_the_ingress_speaks_grpc_to_the_pods(render: Any, settings: tuple[str, ...], protocol: str) -> None:
    host = ("ingress.enabled=true", "ingress.host=speech.example.org", "ingress.tlsSecret=host")
    ingress = render(*host, *settings).one("Ingress")
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/backend-protocol"] == protocol
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    assert ingress["spec"]["tls"] == [{"hosts": ["speech.example.org"], "secretName": "host"}]


def test_the_policy_lets_in_whom_it_names(render: Any) -> None:
    clients = "networkPolicy.clients[0].podSelector.matchLabels.app=frontend"
    scrapers = "networkPolicy.scrapers[0].namespaceSelector.matchLabels.team=monitoring"
    manifests = render(clients, scrapers)
    speech, metrics = manifests.one("NetworkPolicy")["spec"]["ingress"]
    assert [rule["port"] for rule in speech["ports"]] == ["grpc"]
    assert {"podSelector": {"matchLabels": {"app": "frontend"}}} in speech["from"]
    test = manifests.one("Pod", "-test")["metadata"]["labels"]
    assert any(p["podSelector"]["matchLabels"].items() <= test.items() for p in speech["from"])
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]


def test_a_drained_node_takes_one_pod_at_a_time(render: Any) -> None:
    manifests = render("replicas=3")
    budget = manifests.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == manifests.one("Deployment")["spec"]["selector"]


# Scaling


def test_the_hpa_counts_requests_and_lets_streams_end(render: Any) -> None:
    manifests = render("autoscaling.kind=hpa", "longestRequestSeconds=300")
    assert "replicas" not in manifests.one("Deployment")["spec"]
    scaler = manifests.one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["kind"] == "Deployment"
    means = {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in scaler["metrics"]}
    assert means == {
        "nv_inference_pending_request_count": "4",
        "cosytriton_requests_active": "4",
        "cosytriton_speech_lm_active": "6",
    }
    down = scaler["behavior"]["scaleDown"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]
    assert down["stabilizationWindowSeconds"] == 300


def test_keda_asks_prometheus_for_the_same(render: Any) -> None:
    manifests = render(*KEDA)
    scaler = manifests.one("ScaledObject")["spec"]
    asked = [trigger["metadata"] for trigger in scaler["triggers"]]
    assert {one["serverAddress"] for one in asked} == {PROMETHEUS}
    queries = [one["query"] for one in asked]
    assert queries == [
        'sum(cosytriton_requests_active{namespace="speech",job="demo"})',
        'sum(cosytriton_speech_lm_active{namespace="speech",job="demo"})',
        'sum(nv_inference_pending_request_count{namespace="speech",job="demo"})',
    ]
    labels = manifests.one("PodMonitor")["spec"]
    assert labels["jobLabel"] == "app.kubernetes.io/instance"  # which makes the job of the queries
    assert scaler["fallback"]["replicas"] == scaler["minReplicaCount"] == 2


def test_the_first_pod_of_none_is_woken(render: Any) -> None:
    wake = ("autoscaling.minReplicas=0", "autoscaling.wakeQuery=sum(rate(requests[1m]))")
    scaler = render(*KEDA, *wake).one("ScaledObject")["spec"]
    assert scaler["minReplicaCount"] == 0
    trigger = scaler["triggers"][-1]["metadata"]
    assert (trigger["query"], trigger["activationThreshold"]) == ("sum(rate(requests[1m]))", "0")


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        (("disaggregated.part=lm",), "cosytriton_speech_lm_active"),
        (("disaggregated.part=sound", "disaggregated.lmUrl=lm:8001"), "cosytriton_requests_active"),
    ],
)
def test_each_part_is_scaled_by_what_it_publishes(
    render: Any, settings: tuple[str, ...], metric: str
) -> None:
    scaler = render("autoscaling.kind=hpa", *settings).one("HorizontalPodAutoscaler")["spec"]
    found = {one["pods"]["metric"]["name"] for one in scaler["metrics"]}
    assert found == {"nv_inference_pending_request_count", metric}


# Argo Rollouts, KServe


def test_a_rollout_moves_the_weights_of_a_route(render: Any) -> None:
    manifests = render(*ROLLOUT, *GATEWAY, "rollout.weights={5,25}")
    assert not manifests.all("Deployment")
    canary = manifests.one("Rollout")["spec"]["strategy"]["canary"]
    assert [step["setWeight"] for step in canary["steps"] if "setWeight" in step] == [5, 25]
    assert [step["pause"] for step in canary["steps"] if "pause" in step] == 2 * [{"duration": "600s"}]
    services = {m["metadata"]["name"] for m in manifests.all("Service")}
    assert {canary["stableService"], canary["canaryService"]} <= services
    (rule,) = manifests.one("GRPCRoute")["spec"]["rules"]
    shares = {ref["name"]: ref["weight"] for ref in rule["backendRefs"]}
    assert shares == {canary["stableService"]: 100, canary["canaryService"]: 0}


def test_a_rollout_is_judged_by_its_new_pods(render: Any) -> None:
    manifests = render(*ROLLOUT, "rollout.firstAudioMilliseconds=800")
    template = manifests.one("AnalysisTemplate")["spec"]
    steps = manifests.one("Rollout")["spec"]["strategy"]["canary"]["steps"]
    (argument,) = [step["analysis"]["args"][0] for step in steps if "analysis" in step][:1]
    assert argument["name"] == template["args"][0]["name"]
    assert argument["valueFrom"] == {"podTemplateHashValue": "Latest"}
    for metric in template["metrics"]:
        query = metric["provider"]["prometheus"]["query"]
        assert query.count('rollouts_pod_template_hash="{{args.pods}}"') == query.count("cosytriton_")
    assert template["metrics"][0]["successCondition"].endswith("result[0] <= 800")
    assert manifests.one("PodMonitor")["spec"]["podTargetLabels"] == ["rollouts-pod-template-hash"]


def test_pods_are_the_same_whatever_runs_them(render: Any) -> None:
    pod = render().pod
    assert render("workload=Rollout").one("Rollout")["spec"]["template"]["spec"] == pod
    predictor = render("workload=InferenceService").one("InferenceService")["spec"]["predictor"]
    (container,) = predictor["containers"]
    assert container.pop("name") == "kserve-container"
    assert {**pod["containers"][0], **container} == pod["containers"][0]
    assert predictor["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"]


# Observability


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitors_scrape_the_port_of_the_metrics(render: Any, kind: str) -> None:
    manifests = render(f"metrics.monitor={kind}", "metrics.labels.release=prometheus")
    monitor = manifests.one(kind)
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    endpoints = monitor["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert endpoints == [{"port": "metrics", "interval": "15s"}]
    found = manifests.one("Service", "-metrics" if kind == "ServiceMonitor" else "")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["metadata"]["labels"].items()


def test_rules_and_the_dashboard_are_those_of_the_files(render: Any) -> None:
    manifests = render("metrics.rules=true", "metrics.dashboard=true")
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())
    assert manifests.one("PrometheusRule")["spec"] == rules
    (dashboard,) = manifests.one("ConfigMap", "-dashboard")["data"].values()
    assert json.loads(dashboard) == json.loads((FILES / "dashboard.json").read_text())


def test_neither_is_there_unless_asked(render: Any) -> None:
    assert not {"PrometheusRule", "ConfigMap", "PodMonitor", "ServiceMonitor"} & render().kinds


# helm test


@pytest.mark.parametrize(("settings", "words"), [((), 1), (("tls.secret=t",), 2)])
def test_the_test_speaks_through_the_service(render: Any, settings: tuple[str, ...], words: int) -> None:
    test = render(*settings).one("Pod", "-test")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = test["spec"]["containers"]
    script, *arguments = container["args"]
    assert ast.dump(ast.parse(script)) == ast.dump(ast.parse((FILES / "speak.py").read_text()))
    assert arguments == ["demo-cosytriton:8001", "/tls"][:words]


def run_test_pod(render: Any, url: str) -> subprocess.CompletedProcess[str]:
    """What the test's container does, with another address."""
    (container,) = render().one("Pod", "-test")["spec"]["containers"]
    program, flag = container["command"]
    script, _ = container["args"]
    assert program == "python3"
    return subprocess.run(
        [sys.executable, flag, script, url], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_test_succeeds_at_a_server_that_speaks(render: Any, server: Any) -> None:
    done = run_test_pod(render, server.grpc_url)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^(whole|stream): ([\d.]+) s of speech", done.stdout, re.MULTILINE))
    assert set(said) == {"whole", "stream"}
    assert min(map(float, said.values())) > 0.3


def test_the_test_fails_where_nobody_speaks(render: Any) -> None:
    (port,) = free_ports(1)
    assert run_test_pod(render, f"127.0.0.1:{port}").returncode != 0
