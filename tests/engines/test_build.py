"""The build of a profile: whole models with their manifests, nothing half-made, nothing twice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_engines.build import JOURNALS, Build, Built
from cosytriton_engines.calibration.sets import CalibrationSet, make_set, open_set
from cosytriton_engines.engine.builder import EngineError, EngineOptions
from cosytriton_engines.engine.plan import PlanRunner
from cosytriton_engines.engine.plans import PlanBuilder
from cosytriton_engines.errors import BuildError
from cosytriton_ensemble.cli import main
from cosytriton_ensemble.errors import CosytritonError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import check_artifact, manifest_path
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU, CPU_INT8, GPU, GPU_FP16, GPU_INT8, INT8_GRAPH, Profile
from cosytriton_ensemble.repository import check_repository, version_directory

PIPELINE = pipeline_of(COSYVOICE2)
QUICK = PIPELINE.speaker_embedding.name
MACHINE = Machine("NVIDIA L4 8.9", "10.16.1")


@pytest.fixture(scope="module")
def built(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a calibration set beside it and one model in INT8."""
    repository = tmp_path_factory.mktemp("built") / "model_repository"
    shutil.copytree(tiny_repository, repository)
    Build(repository, CPU_INT8, make_set(repository, repository.parent / "calibration")).run([QUICK])
    return repository


@pytest.fixture
def calibration(built: Path) -> CalibrationSet:
    return open_set(built.parent / "calibration")


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(built, tmp_path / "model_repository"))


def artifact(repository: Path, file: str = INT8_GRAPH) -> Path:
    return version_directory(repository, QUICK) / file


def build(
    repository: Path, calibration: CalibrationSet, profile: Profile = CPU_INT8, **kwargs: Any
) -> list[Built]:
    return Build(repository, profile, calibration, **kwargs).run([QUICK])


def test_a_manifest_says_how_good_the_artifact_is(built: Path) -> None:
    manifest = check_artifact(artifact(built))
    assert manifest.precision == "int8"
    assert manifest.errors.keys() == manifest.tolerance.keys()
    assert manifest.errors["cosine_mean"] > 0.99


@pytest.mark.gate
def test_every_profile_is_complete_and_fits(variants: Callable[..., Path]) -> None:
    repository = variants(COSYVOICE2)
    check_repository(repository, CPU_INT8)
    for profile in (CPU_INT8, GPU_FP16, GPU_INT8):
        for model in Build(repository, profile, open_set(repository.parent / "calibration")).models():
            assert check_artifact(version_directory(repository, model) / profile.graph).errors
    assert not (version_directory(repository, "prompt_mel") / INT8_GRAPH).exists(), "it learned nothing"


def test_what_is_there_and_fits_is_not_built_again(built: Path, calibration: CalibrationSet) -> None:
    lines: list[str] = []
    assert build(built, calibration, progress=lines.append) == []
    assert lines == [f"[1/1] {QUICK}: up to date"]


def test_a_stale_graph_is_built_again(repository: Path, calibration: CalibrationSet) -> None:
    artifact(repository).write_bytes(b"something else")
    with pytest.raises(RepositoryError, match="cosytriton build --profile cpu_int8"):
        check_artifact(artifact(repository))
    (one,) = build(repository, calibration)
    assert one.path == artifact(repository)
    assert check_artifact(one.path).calibration == calibration.digest


@pytest.mark.parametrize("profile", [CPU, GPU], ids=lambda profile: profile.name)
def test_profiles_of_the_export_have_nothing_to_build(
    profile: Profile, built: Path, calibration: CalibrationSet
) -> None:
    with pytest.raises(BuildError, match=f"{profile.name} serves what the export wrote"):
        Build(built, profile, calibration)


def test_an_unknown_model_is_refused_with_those_that_are(built: Path, calibration: CalibrationSet) -> None:
    with pytest.raises(BuildError, match=r"unknown models tts; known are speaker_embedding"):
        Build(built, CPU_INT8, calibration).run(["tts"])


def test_a_calibration_set_of_another_checkpoint_is_refused(
    demo_repository: Path, calibration: CalibrationSet
) -> None:
    with pytest.raises(CosytritonError, match=r"another checkpoint.*cosytriton calibrate"):
        Build(demo_repository, CPU_INT8, calibration)


def test_a_failure_leaves_the_old_artifact(
    repository: Path, calibration: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = artifact(repository).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("cosytriton_engines.build.save", fail)
    with pytest.raises(OSError, match="no space"):
        Build(repository, CPU_INT8, calibration).run([QUICK], again=True)
    assert artifact(repository).read_bytes() == before
    check_artifact(artifact(repository))
    assert not list(artifact(repository).parents[1].glob(".draft-*"))


@pytest.mark.parametrize("lines", [0, 1, 2, 3])
def test_a_build_that_is_killed_leaves_nothing_that_is_believed(
    lines: int, repository: Path, calibration: CalibrationSet
) -> None:
    """Killed at once or after some lines of progress: what is there is whole and fits, or is refused."""
    artifact(repository).unlink()
    manifest_path(artifact(repository)).unlink()
    shutil.rmtree(artifact(repository).parents[1] / JOURNALS)
    command = [str(Path(sys.executable).with_name("cosytriton")), "build", "--profile", "cpu_int8"]
    command += ["--repository", str(repository), "--calibration", str(calibration.folder), "--models", QUICK]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert all(QUICK.encode() in process.stderr.readline() for _ in range(lines))
        os.killpg(process.pid, signal.SIGKILL)
    if artifact(repository).exists() and manifest_path(artifact(repository)).exists():
        check_artifact(artifact(repository))
    else:
        with pytest.raises(RepositoryError, match="cosytriton build --profile cpu_int8"):
            check_artifact(artifact(repository))
    build(repository, calibration)
    check_artifact(artifact(repository))


def run(*arguments: object) -> int:
    return main(["build", *map(str, arguments)])


def test_a_report_shows_what_was_measured(
    repository: Path, calibration: CalibrationSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    place = ("--repository", repository, "--calibration", calibration.folder)
    assert (
        run(*place, "--profile", "cpu_int8", "gpu_fp16", "--graphs", "--models", QUICK, "--report", page) == 0
    )
    text, said = page.read_text(), capsys.readouterr().out
    assert all(file in text and file in said for file in ("model.int8.onnx", "model.fp16.onnx"))
    assert calibration.digest in text
    assert "untrained" in text
    assert "cosine, mean" in said


def test_the_curve_of_the_loss_is_measured_on_demand(repository: Path, calibration: CalibrationSet) -> None:
    """The loss with nothing kept, and with more and more, to everything."""
    variant = Build(repository, CPU_INT8, calibration, curve=True).run([QUICK], again=True)[0].variant
    kept = [trial.kept for trial in variant.outcome.trials]
    assert kept[:3] == [0, 1, 2]
    assert kept[-1] == len(variant.sensitivity)
    assert variant.outcome.trials[-1].figures["cosine_mean"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "cpu_int8", "--report", "page.pdf"], r"report is named .html or .md"),
        (["--profile", "gpu_fp16"], r"this machine has none.*--graphs"),
        (["--profile", "cpu_int8", "--models", "tts"], r"unknown models tts; known are"),
        (["--profile", "cpu_int8", "--calibration", "nowhere"], r"nowhere.*cosytriton calibrate"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_built(
    arguments: list[str], message: str, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in built.rglob("*"))
    assert run("--repository", built, *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted((path, path.stat().st_mtime_ns) for path in built.rglob("*")) == before


def test_without_a_gpu_no_plan_is_promised() -> None:
    with pytest.raises(EngineError, match="has none. Build the graphs here with --graphs"):
        PlanBuilder.here(EngineOptions())


@pytest.mark.parametrize("profile", [GPU_FP16, GPU_INT8], ids=lambda profile: profile.name)
def test_a_plan_has_a_manifest_of_its_gpu(
    profile: Profile, repository: Path, calibration: CalibrationSet, trt: Any, cuda: Any
) -> None:
    plans = PlanBuilder(MACHINE, trt, cuda, EngineOptions())
    build(repository, calibration, profile, plans=plans)
    assert profile.plan is not None
    manifest = check_artifact(artifact(repository, profile.plan), MACHINE)
    assert (manifest.gpu, manifest.tensorrt, manifest.precision) == (
        MACHINE.gpu,
        "10.16.1",
        profile.precision,
    )
    assert profile.graph in manifest.source
    with pytest.raises(RepositoryError, match=f"cosytriton build --profile {profile.name}"):
        check_artifact(artifact(repository, profile.plan), Machine("NVIDIA A10 8.6", "10.16.1"))


@pytest.mark.parametrize("value", [np.nan, 0.0], ids=["NaN", "silence"])
def test_a_plan_that_computes_nonsense_is_refused(
    value: float,
    repository: Path,
    calibration: CalibrationSet,
    trt: Any,
    cuda: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = PlanRunner.run
    monkeypatch.setattr(
        PlanRunner, "run", lambda self, feed: {n: np.full_like(a, value) for n, a in real(self, feed).items()}
    )
    with pytest.raises(
        EngineError, match=r"model.fp16.plan of speaker_embedding is not as good as its graph"
    ):
        build(repository, calibration, GPU_FP16, plans=PlanBuilder(MACHINE, trt, cuda, EngineOptions()))
    assert not artifact(repository, "model.fp16.plan").exists()


@pytest.mark.gate
def test_every_plan_of_a_profile_is_built_and_served_files_are_complete(
    variants: Callable[..., Path], trt: Any, cuda: Any, tmp_path: Path
) -> None:
    """The language model's plan too, whose caches lie on the device."""
    source = variants(COSYVOICE2)
    shutil.copytree(source.parent, tmp_path, dirs_exist_ok=True)
    repository = tmp_path / source.name
    plans = PlanBuilder(MACHINE, trt, cuda, EngineOptions())
    Build(repository, GPU_FP16, open_set(tmp_path / "calibration"), plans=plans).run()
    for stage in (*PIPELINE.native_stages, PIPELINE.speech_lm):
        check_artifact(version_directory(repository, stage.name) / "model.fp16.plan", MACHINE)
