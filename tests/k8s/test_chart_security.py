"""Every pod of the chart against the Pod Security level "restricted", field by field, and a little beyond it.

The controls are those of https://kubernetes.io/docs/concepts/security/pod-security-standards/ with the levels
"baseline" and "restricted"; image volumes are admitted since Kubernetes 1.33.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Pod = dict[str, Any]
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
PROFILES = ("RuntimeDefault", "Localhost")


def containers(pod: Pod) -> Iterator[Pod]:
    for group in ("initContainers", "containers", "ephemeralContainers"):
        yield from pod.get(group, ())


def contexts(pod: Pod) -> list[Pod]:
    """Security contexts of the pod and of its containers."""
    return [one.get("securityContext", {}) for one in (pod, *containers(pod))]


def everywhere(pod: Pod, name: str) -> bool:
    """Whether every container has the field, from the pod's context or its own, and none takes it back."""
    whole, *own = contexts(pod)
    return all(context.get(name, whole.get(name)) not in (None, False) for context in own)


def hooks(container: Pod) -> Iterator[Pod]:
    """Probes and the actions of the container's life."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield container.get(name, {})
    yield from container.get("lifecycle", {}).values()


CONTROLS: dict[str, Callable[[Pod], bool]] = {
    # baseline
    "host processes": lambda pod: not any("windowsOptions" in one for one in contexts(pod)),
    "host namespaces": lambda pod: not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    "privileged": lambda pod: not any(one.get("privileged") for one in contexts(pod)),
    "host ports": lambda pod: (
        not any(port.get("hostPort") for one in containers(pod) for port in one.get("ports", ()))
    ),
    "hosts of probes": lambda pod: (
        not any(
            hook.get(kind, {}).get("host")
            for one in containers(pod)
            for hook in hooks(one)
            for kind in ("httpGet", "tcpSocket")
        )
    ),
    "AppArmor, SELinux": lambda pod: (
        not any({"appArmorProfile", "seLinuxOptions"} & set(one) for one in contexts(pod))
    ),
    "proc mount": lambda pod: all(one.get("procMount", "Default") == "Default" for one in contexts(pod)),
    "sysctls": lambda pod: not pod.get("securityContext", {}).get("sysctls"),
    # restricted
    "volume types": lambda pod: all(set(one) - {"name"} <= VOLUMES for one in pod.get("volumes", ())),
    "privilege escalation": lambda pod: all(
        one.get("allowPrivilegeEscalation") is False for one in contexts(pod)[1:]
    ),
    "running as non-root": lambda pod: everywhere(pod, "runAsNonRoot"),
    "non-root user": lambda pod: all(one.get("runAsUser") != 0 for one in contexts(pod)),
    "seccomp": lambda pod: (
        everywhere(pod, "seccompProfile")
        and all(one.get("seccompProfile", {"type": PROFILES[0]})["type"] in PROFILES for one in contexts(pod))
    ),
    "capabilities": lambda pod: all(
        "ALL" in one.get("capabilities", {}).get("drop", ())
        and set(one["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"}
        for one in contexts(pod)[1:]
    ),
    # beyond it
    "read-only root file system": lambda pod: all(
        one.get("readOnlyRootFilesystem") is True for one in contexts(pod)[1:]
    ),
    "no token": lambda pod: pod.get("automountServiceAccountToken") is False,
    "limits": lambda pod: all("memory" in one["resources"]["limits"] for one in containers(pod)),
}


def violations(pod: Pod) -> list[str]:
    return [name for name, keeps in CONTROLS.items() if not keeps(pod)]


EVERYTHING = (
    "profile=gpu_fp16",
    "engines.enabled=true",
    "engines.claim=engines",
    "gpu.products[0]=NVIDIA-H200",
    "models.source=objectStore",
    "models.objectStore.path=s3:tts/v2",
    "networkPolicy.egress[0].to[0].ipBlock.cidr=10.0.0.0/8",
    "voices.claim=people",
    "tls.secret=certificate",
    "admin.secret=admin",
    "http.enabled=true",
)


@pytest.mark.parametrize("settings", [(), EVERYTHING, ("models.source=image", "models.image.reference=a/b")])
def test_every_pod_is_restricted(render: Any, settings: tuple[str, ...]) -> None:
    pods = list(render(*settings).pods())
    assert len(pods) == 2 + (settings is EVERYTHING)
    for pod in pods:
        assert violations(pod) == []


@pytest.mark.chart
def test_every_pod_of_every_combination_is_restricted(render: Any, combination: tuple[str, ...]) -> None:
    for pod in render(*combination).pods():
        assert violations(pod) == []


FAULTS: dict[str, Callable[[Pod, Pod], Any]] = {
    "host processes": lambda pod, _: pod["securityContext"].update(windowsOptions={"hostProcess": True}),
    "host namespaces": lambda pod, _: pod.update(hostIPC=True),
    "privileged": lambda _, one: one["securityContext"].update(privileged=True),
    "host ports": lambda _, one: one["ports"][0].update(hostPort=8001),
    "hosts of probes": lambda _, one: one["livenessProbe"].update(httpGet={"port": 1, "host": "a"}),
    "AppArmor, SELinux": lambda pod, _: pod["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
    "proc mount": lambda _, one: one["securityContext"].update(procMount="Unmasked"),
    "sysctls": lambda pod, _: pod["securityContext"].update(sysctls=[{"name": "kernel.shmmax"}]),
    "volume types": lambda pod, _: pod["volumes"].append({"name": "a", "hostPath": {"path": "/"}}),
    "privilege escalation": lambda _, one: one["securityContext"].pop("allowPrivilegeEscalation"),
    "running as non-root": lambda _, one: one["securityContext"].update(runAsNonRoot=False),
    "non-root user": lambda _, one: one["securityContext"].update(runAsUser=0),
    "seccomp": lambda pod, _: pod["securityContext"].pop("seccompProfile"),
    "capabilities": lambda _, one: one["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]),
    "read-only root file system": lambda _, one: one["securityContext"].pop("readOnlyRootFilesystem"),
    "no token": lambda pod, _: pod.pop("automountServiceAccountToken"),
    "limits": lambda _, one: one["resources"]["limits"].pop("memory"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_each_fault_is_noticed(render: Any, control: str) -> None:
    pod = copy.deepcopy(render().pod)
    FAULTS[control](pod, pod["containers"][0])
    assert violations(pod) == [control]


def test_the_server_writes_to_volumes_of_its_own_alone(render: Any) -> None:
    """The root file system is read-only, and so is what other pods read."""
    pod = render(*EVERYTHING).pod
    kinds = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
    (server,) = pod["containers"]
    writable = {m["name"] for m in server["volumeMounts"] if not m.get("readOnly")} - {"voices"}
    assert writable == {"shm", "tmp"}
    assert all(kinds[name] == {"emptyDir"} for name in writable)


def test_secrets_are_files_that_the_group_may_read(render: Any) -> None:
    pod = render(*EVERYTHING).pod
    modes = {one["secret"]["defaultMode"] for one in pod["volumes"] if "secret" in one}
    assert modes == {0o440}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
