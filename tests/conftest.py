"""What tests of several packages share: golden tensors, a tiny checkpoint, and what it exports to."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from cosytriton_ensemble.families import COSYVOICE2, FAMILIES, Family

if TYPE_CHECKING:
    from cosytriton_ensemble.serving import RunningServer
    from cosytriton_export.checkpoint import Checkpoint

# Read when torch is loaded. Where other processes compute too, threads that wait for each other by spinning
# take twenty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

GOLDEN = Path(__file__).with_name("golden")
QWEN_CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", default="cpu", help="profile that repositories are built for and served in")


class Golden(dict[str, npt.NDArray[Any]]):
    """Tensors of one golden file; large outputs are thinned to every `stride`-th entry (see its README)."""

    def __init__(self, path: Path) -> None:
        from safetensors import deserialize

        raw = lzma.decompress(path.read_bytes())
        size = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + size]).get("__metadata__", {})
        types = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}
        super().__init__(
            (name, np.frombuffer(view["data"], types[view["dtype"]]).reshape(view["shape"]).copy())
            for name, view in deserialize(raw)  # type: ignore[no-untyped-call]
        )
        self.stride = int(metadata.get("stride", 1))
        self.shapes = {
            key.removeprefix("shape:"): tuple(json.loads(value))
            for key, value in metadata.items()
            if key.startswith("shape:")
        }

    def thin(self, key: str, actual: Any) -> npt.NDArray[Any]:
        """The entries of `actual` (array or torch tensor) that the file holds of `key`; checks its shape."""
        array = np.asarray(actual)
        wanted = self.shapes.get(key, self[key].shape)
        assert array.shape == wanted, f"{key}: {array.shape}, golden {wanted}"
        return array.reshape(-1)[:: self.stride] if key in self.shapes else array

    def assert_close(self, key: str, actual: Any, atol: float, rms: float | None = None) -> None:
        """Compare `actual` with the golden tensor, whole or thinned; `rms` also bounds the rms error."""
        given = self.thin(key, actual)
        np.testing.assert_allclose(given, self[key], rtol=0, atol=atol, err_msg=key)
        if rms is not None:
            error = float(np.sqrt(np.mean((given - self[key]) ** 2)))
            assert error <= rms, f"{key}: rms error {error:.2e}, allowed {rms:.0e}"


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Read `tests/golden/<name>.safetensors.xz`; a fresh copy each time."""
    return lambda name: Golden(GOLDEN / f"{name}.safetensors.xz")


@dataclass(frozen=True)
class GoldenLM:
    """The tiny language model of the official runs: weights by their names, a module, a graph."""

    checkpoint: Checkpoint  # has no other parts
    state: dict[str, Any]
    model: Any
    graph: Path


@pytest.fixture(scope="session")
def golden_lm(
    golden: Callable[[str], Golden], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], GoldenLM]:
    """That of a version: "v1", "v2" or "v3". Tests share it; leave it as it is."""
    import torch

    from cosytriton_export.checkpoint import TEXT_MODEL, Checkpoint
    from cosytriton_export.hyperyaml import load_hyperyaml
    from cosytriton_export.llm import language_model_of
    from cosytriton_export.llm_graph import export_llm

    @lru_cache
    def make(version: str) -> GoldenLM:
        folder, family = tmp_path_factory.mktemp(version), FAMILIES[f"cosyvoice{version[1:]}"]
        state = {key: torch.from_numpy(value) for key, value in golden(f"llm_{version}_weights").items()}
        if version != "v1":
            state["llm.model.lm_head.weight"] = state["llm.model.model.embed_tokens.weight"]
            (folder / TEXT_MODEL).mkdir()
            (folder / TEXT_MODEL / "config.json").write_text(json.dumps(QWEN_CONFIG))
        torch.save(state, folder / "llm.pt")
        config = load_hyperyaml(GOLDEN / family.config_file.replace(".", "_tiny."))
        checkpoint = Checkpoint(folder, family, config)
        model = language_model_of(checkpoint).requires_grad_(False)
        export_llm(model, folder / "model.onnx")
        return GoldenLM(checkpoint, state, model, folder / "model.onnx")

    return make


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Checkpoint]:
    """An untrained checkpoint of each family, tiny. Copy its directory before you change a file."""
    from cosytriton_export.writer import write_checkpoint

    @lru_cache
    def write(family: Family) -> Checkpoint:
        return write_checkpoint(tmp_path_factory.mktemp(family.name) / "checkpoint", family=family)

    return write


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoints: Callable[[Family], Checkpoint]) -> Checkpoint:
    """The untrained checkpoint of CosyVoice 2."""
    return checkpoints(COSYVOICE2)


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The demo voice, a tiny trained checkpoint."""
    from cosytriton_export.checkpoint import Checkpoint
    from cosytriton_export.demo_voice import unpack_demo_voice

    return Checkpoint.open(unpack_demo_voice(tmp_path_factory.mktemp("demo")))


@pytest.fixture(scope="session")
def repositories(
    request: pytest.FixtureRequest,
    exports: ThreadPoolExecutor,
    checkpoints: Callable[[Family], Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Family], Path]:
    """A complete model repository of each tiny checkpoint. Copy it before you change a file."""

    def submit(family: Family) -> Future[Path]:
        folder, profile = tmp_path_factory.mktemp(family.name), request.config.getoption("--profile")
        return exports.submit(exported, checkpoints(family), folder, profile)

    submitted = {family: submit(family) for family in FAMILIES.values()}
    return lambda family: submitted[family].result()


@pytest.fixture(scope="session")
def tiny_repository(repositories: Callable[[Family], Path]) -> Path:
    """A complete model repository of CosyVoice 2's tiny checkpoint."""
    return repositories(COSYVOICE2)


@pytest.fixture(scope="session")
def demo_export(
    request: pytest.FixtureRequest,
    exports: ThreadPoolExecutor,
    demo_checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Future[Path]:
    folder, profile = tmp_path_factory.mktemp("demo-repository"), request.config.getoption("--profile")
    return exports.submit(exported, demo_checkpoint, folder, profile)


@pytest.fixture(scope="session")
def demo_repository(demo_export: Future[Path]) -> Path:
    """A complete model repository of the demo voice."""
    return demo_export.result()


@pytest.fixture(scope="session")
def exports() -> Iterator[ThreadPoolExecutor]:
    """Exports repositories one after another, while other tests run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def int8_repository(demo_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo voice with the profile `cpu_int8` too. Copy it before you change a file."""
    repository = tmp_path_factory.mktemp("int8") / "model_repository"
    shutil.copytree(demo_repository, repository)
    with_graphs(repository, "cpu_int8")
    return repository


@pytest.fixture(scope="session")
def variants(
    repositories: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Family], Path]:
    """A tiny repository of each family with the graphs of every profile."""

    @lru_cache
    def build(family: Family) -> Path:
        repository = tmp_path_factory.mktemp(f"{family.name}-variants") / "model_repository"
        shutil.copytree(repositories(family), repository)
        with_graphs(repository, "cpu_int8", "gpu_fp16", "gpu_int8")
        return repository

    return build


def with_graphs(repository: Path, *profiles: str) -> None:
    """Build the graphs of profiles into a repository, with a calibration set beside it."""
    from cosytriton_engines.build import Build
    from cosytriton_engines.calibration.sets import make_set
    from cosytriton_ensemble.profiles import PROFILES

    calibration = make_set(repository, repository.parent / "calibration")
    for name in profiles:
        Build(repository, PROFILES[name], calibration).run()


def exported(checkpoint: Checkpoint, folder: Path, profile: str = "cpu") -> Path:
    from cosytriton_ensemble.repository import write_repository
    from cosytriton_export.exporter import export_checkpoint

    repository = folder / "model_repository"
    write_repository(repository, checkpoint.family)
    export_checkpoint(checkpoint, repository, workers=2)
    if profile != "cpu":
        with_graphs(repository, profile)
    return repository


BACKGROUND = ("demo_export", "repositories")  # fixtures that begin to export, and do not wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a repository come last: until then it is exported beside the others."""

    def needs(item: pytest.Item) -> bool:
        return any(name in getattr(item, "fixturenames", ()) for name in BACKGROUND)

    items.sort(key=needs)


@pytest.fixture(scope="session", autouse=True)
def _begin_exports(request: pytest.FixtureRequest) -> None:
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in BACKGROUND:
        if name in needed:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def server(
    serve: Callable[..., AbstractContextManager[RunningServer]],
    demo_repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningServer]:
    """`cosytriton serve` with the demo voice, ready to speak; shared by all tests that do not harm it."""
    with serve(demo_repository, tmp_path_factory.mktemp("server") / "serve.log") as running:
        yield running


@pytest.fixture(scope="session")
def serve(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[RunningServer]]:
    """Start a server of one's own: `with serve(repository, log_file, "--profile=cpu_int8") as running`."""
    from cosytriton_ensemble.serving import serving

    usual = (f"--profile={request.config.getoption('--profile')}", "--exit-timeout=10")
    return lambda repository, log, *options: serving(repository, log, *usual, *options)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with `tls.crt`, `tls.key` and the `ca.crt` that signed them; needs openssl."""

    def make(name: str = "localhost", usage: str = "serverAuth,clientAuth", days: int = 2) -> Path:
        folder = tmp_path_factory.mktemp("tls")
        # Elliptic curves: an RSA key takes seconds.
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch")
        extensions = f"subjectAltName=DNS:{name}\nextendedKeyUsage={usage}\n"
        (folder / "extensions").write_text(extensions)
        for command in (
            ("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority"),
            ("req", *key, "-keyout", "tls.key", "-out", "request", "-subj", "/CN=server"),
            ("x509", "-req", "-in", "request", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
             "-days", str(days), "-extfile", "extensions", "-out", "tls.crt"),
        ):  # fmt: skip
            subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
        return folder

    return make
