"""The images: what a linter says, what they promise, and their build steps in a clean environment.

There need be no Docker here: a step is what stands behind RUN, with the image's folders elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from cosytriton_client import Client
from cosytriton_ensemble import installation
from cosytriton_ensemble.cli import GROUP
from cosytriton_ensemble.commands import SERVE
from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.installation import Installation
from cosytriton_ensemble.server import ServerOptions, free_ports
from cosytriton_ensemble.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "k8s" / "images"
NAMES = ("cpu", "gpu")
LINTER = Path(sys.executable).with_name("hadolint")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LABELS = {"title", "description", "licenses", "version", "revision", "base.name"}


def text_of(name: str) -> str:
    return (IMAGES / f"{name}.Dockerfile").read_text()


def stages_of(name: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage."""
    stages: list[list[tuple[str, str]]] = []
    for line in DockerfileParser(path=str(IMAGES / f"{name}.Dockerfile")).structure:
        if line["instruction"] == "FROM":
            stages.append([])
        if stages and line["instruction"] != "COMMENT":
            stages[-1].append((line["instruction"], line["value"]))
    return stages


def value(stage: list[tuple[str, str]], instruction: str) -> str:
    (found,) = [value for name, value in stage if name == instruction]
    return found


def lint(text: str) -> str:
    done = subprocess.run([LINTER, "-"], input=text, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_linter_has_nothing_to_say(name: str) -> None:
    assert lint(text_of(name)) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("USER 1000:1000", "USER root", "DL3002"),
        ('ENTRYPOINT ["cosytriton"]', "ENTRYPOINT cosytriton", "DL3025"),
        ("COPY . /src", "ADD . /src", "DL3020"),
    ],
)
def test_the_linter_is_awake(right: str, wrong: str, rule: str) -> None:
    text = text_of("cpu")
    assert right in text
    assert rule in lint(text.replace(right, wrong))


@pytest.mark.parametrize("name", NAMES)
def test_the_image_runs_as_nobody_and_holds_no_tools(name: str) -> None:
    build, final = stages_of(name)
    instructions = [instruction for instruction, _ in final]
    assert value(final, "USER") == "1000:1000"
    assert instructions.index("USER") > max(
        i for i, each in enumerate(instructions) if each in ("RUN", "COPY")
    )
    # The environment that is copied has no pip, and nothing else comes from the stage that builds.
    assert "venv --without-pip /opt/cosytriton" in next(text for kind, text in build if kind == "RUN")
    assert value(final, "COPY") == "--from=build /opt/cosytriton /opt/cosytriton"
    assert all("uninstall" in text for kind, text in final if kind == "RUN")
    assert json.loads(value(final, "ENTRYPOINT")) == ["cosytriton"]
    assert not {"ADD", "VOLUME"} & set(instructions)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_starts_serving_with_options_that_exist(name: str) -> None:
    *_, final = stages_of(name)
    command, *words = json.loads(value(final, "CMD"))
    parser = argparse.ArgumentParser()
    SERVE.arguments(parser)
    assert command == "serve"
    assert parser.parse_args(words).host == "0.0.0.0"


@pytest.mark.parametrize("name", NAMES)
def test_the_labels_are_those_of_the_open_container_initiative(name: str) -> None:
    parser = DockerfileParser(path=str(IMAGES / f"{name}.Dockerfile"))
    assert set(parser.labels) == {f"org.opencontainers.image.{label}" for label in LABELS}
    assert parser.labels["org.opencontainers.image.version"] == PROJECT["project"]["version"]
    assert parser.labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


def test_the_base_is_the_triton_release_that_is_asked_for() -> None:
    arguments = dict(
        line.removeprefix("ARG ").split("=", 1)
        for line in text_of("gpu").splitlines()
        if "ARG " in line and "=" in line
    )
    base = string.Template(arguments["BASE"])
    assert base.substitute(TRITON_VERSION="26.02") == "nvcr.io/nvidia/tritonserver:26.02-py3"
    assert [value(stage, "FROM").split()[0] for stage in stages_of("gpu")] == ["${BASE}", "${BASE}"]


def test_only_what_is_installed_goes_into_the_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    let_in = {line[1:] for line in lines if line.startswith("!")}
    packages = {
        path.split("/")[0] for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    assert let_in == packages | {"pyproject.toml", "README.md", "LICENSE", "k8s", "k8s/images"}


def container(folder: Path, runtime: str | None) -> Installation:
    """A container's Triton whose backend has a library that says so of itself."""
    backend = folder / "backends" / "onnxruntime"
    backend.mkdir(parents=True)
    if runtime is not None:
        source = f'''
        static const char* version(void) {{ return "{runtime}"; }}
        static const struct {{ void* api; const char* (*version)(void); }} base = {{0, version}};
        const void* OrtGetApiBase(void) {{ return &base; }}'''
        library = backend / "libonnxruntime.so.1"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True
        )
    return Installation(folder, container=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("runtime", "opset", "fits"), [("1.23.2", 24, False), ("1.24.0", 24, True), ("1.22.1", 18, True)]
)
def test_graphs_that_the_backend_cannot_read_are_refused(
    tmp_path: Path, runtime: str, opset: int, fits: bool
) -> None:
    triton = container(tmp_path, runtime)
    if fits:
        triton.check_opset(opset)
    else:
        with pytest.raises(ServerError, match=r"ONNX Runtime 1\.23\.2.*opset 24.*needs 1\.24"):
            triton.check_opset(opset)


def test_a_backend_that_says_nothing_is_trusted(tmp_path: Path) -> None:
    container(tmp_path, None).check_opset(24)


def test_the_containers_triton_goes_before_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Installation.here().container
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    (tmp_path / "backends" / "tensorrt").mkdir(parents=True)
    monkeypatch.setattr(installation, "CONTAINER", tmp_path)
    here = Installation.here()
    assert here == Installation(tmp_path, container=True)
    assert here.has("tensorrt")
    assert not here.has("onnxruntime")
    assert here.backends(tmp_path / "unused") == tmp_path / "backends"


@pytest.mark.chart
def test_a_triton_in_the_containers_place_serves_with_its_own_backends(
    demo_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's server, moved to where the container's is, with the stand-in among its backends."""
    wheel, folder = Installation.here(), tmp_path / "tritonserver"
    for name in ("bin", "caches"):
        shutil.copytree(wheel.folder / name, folder / name)
    wheel.backends(folder)
    monkeypatch.setattr(installation, "CONTAINER", folder)
    monkeypatch.setenv("LD_LIBRARY_PATH", wheel.libraries)  # as the container's own libraries are found
    grpc, http, metrics = free_ports(3)
    options = ServerOptions(
        demo_repository, grpc_port=grpc, http_port=http, metrics_port=metrics, exit_timeout=5
    )
    versions: list[str] = []

    def ready(version: str) -> None:
        versions.append(version)
        supervisor.stop()

    supervisor = Supervisor(options, ready)
    supervisor.run()
    assert len(versions) == 1


@pytest.fixture(scope="module")
def check_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("images_check", IMAGES / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("library", "cuda", "requirement"),
    [
        ("10.16.1.11", "13.1.1.006", "tensorrt-cu13-bindings==10.16.1.11.*"),
        ("11.4.0.106", "12.9.0", "tensorrt-cu12-bindings==11.4.0.106.*"),
    ],
)
def test_the_bindings_have_the_version_of_the_library(
    check_module: ModuleType, library: str, cuda: str, requirement: str
) -> None:
    assert check_module.bindings_requirement(library, cuda) == requirement


@pytest.mark.parametrize(
    ("library", "cuda", "message"),
    [
        (None, "13.0", "TensorRT nowhere"),
        ("10.14.1.48", "13.0", "10.14.1.48.*10.15 or newer"),
        ("10.16.1.11", None, "CUDA_VERSION"),
    ],
)
def test_a_base_without_what_is_needed_ends_the_build(
    check_module: ModuleType, library: str | None, cuda: str | None, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        check_module.bindings_requirement(library, cuda)


def test_a_provider_that_lacks_a_library_ends_the_build(check_module: ModuleType) -> None:
    assert "onnxruntime-gpu is not installed" in next(check_module.missing_libraries([]))
    assert not list(check_module.missing_libraries([Path("/bin/sh")]))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that the build stage of the CPU image makes, from the files that the context has."""
    folder = tmp_path_factory.mktemp("image")
    source, environment = folder / "src", folder / "cosytriton"
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in let_in:
        if (ROOT / name).is_dir() and name != "k8s":
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif name != "k8s":
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source)
    build, _ = stages_of("cpu")
    python = Path(sys._base_executable).with_name("python3.11")  # type: ignore[attr-defined]
    for kind, step in build:
        if kind == "RUN":
            step = step.replace("/src", str(source)).replace("/opt/cosytriton", str(environment))
            step = step.replace("python -m", f"{python} -m")
            subprocess.run(["bash", "-euo", "pipefail", "-c", step], check=True, cwd=folder)
    return environment


@pytest.mark.chart
def test_the_steps_install_the_wheel_and_leave_no_pip(built: Path) -> None:
    packages = built / "lib" / "python3.11" / "site-packages"
    points = next(packages.glob("cosytriton-*.dist-info/entry_points.txt")).read_text()
    assert f"[{GROUP}]" in points
    assert (packages / "cosytriton_ensemble" / "py.typed").is_file()
    assert not list(built.glob("bin/pip*"))
    assert not (packages / "pip").exists()


@pytest.mark.chart
def test_what_is_installed_serves_without_writing_or_downloading(
    built: Path, demo_repository: Path, tmp_path: Path, voice: Any
) -> None:
    """As in the pod: another environment, no network for packages or models, nothing but /tmp writable."""
    *_, final = stages_of("cpu")
    declared = dict(part.split("=", 1) for part in value(final, "ENV").split())
    environment = {
        "PATH": f"{built}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        **{name: text for name, text in declared.items() if name not in ("PATH", "HOME")},
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    ports = free_ports(3)
    flags = [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
    command = ["cosytriton", "serve", f"--repository={demo_repository}", "--exit-timeout=5", *flags]
    health = ["cosytriton", "health", f"--url=localhost:{ports[0]}", "--ready", "--deadline=60"]
    installed = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    with subprocess.Popen([built / "bin" / command[0], *command[1:]], env=environment) as server:
        try:
            done = 1
            while done != 0 and server.poll() is None:
                done = subprocess.run(
                    [built / "bin" / health[0], *health[1:]], env=environment, check=False
                ).returncode
            with Client(f"localhost:{ports[0]}") as client:
                assert client.synthesize("one two three", voice).seconds > 0.5
        finally:
            server.terminate()
    assert installed == {path: path.stat().st_mtime_ns for path in built.rglob("*")}


@pytest.mark.chart
def test_what_the_gpu_image_installs_exists_for_the_python_of_its_base(tmp_path: Path) -> None:
    """Ubuntu 24.04's 3.12, as wheels: nothing is compiled in the image."""
    extra = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *extra["container"],
        "tensorrt-cu13-bindings==10.16.1.11.*",
    ]
    while own := [each for each in wanted if each.startswith("cosytriton[")]:
        wanted = [each for each in wanted if each not in own]
        wanted += [each for name in own for each in extra[name.removeprefix("cosytriton[").rstrip("]")]]
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--target", str(tmp_path)]
    only = ["--python-version=3.12", "--only-binary=:all:"]
    subprocess.run([*pip, *only, *wanted], check=True, env=os.environ | {"PIP_CONSTRAINT": ""})
