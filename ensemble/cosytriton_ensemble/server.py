"""The embedded tritonserver as a child process: its command line, its start, its end.

The binary comes from the wheel `nvidia-pytriton`. Its Python backend and this package's `onnxruntime`
stand-in are copied into a temporary backend directory: Triton refuses links that lead out of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.facts import stub_libraries, stub_of, triton_folder
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.metrics import ACTIVE_REQUESTS, read_metric
from cosytriton_ensemble.names import PRECEDENCE_VARIABLE, THREADS_VARIABLE, VOICES_VARIABLE
from cosytriton_ensemble.profiles import CPU, PROFILES, Profile, profile_named
from cosytriton_ensemble.repository import check_repository

SHARED_MEMORY = Path("/dev/shm")
CACHE_BYTES = 256 << 20  # Triton's response cache for the voice stages
DRAIN_PERIOD = 0.2  # seconds between two looks at the requests in flight
# glibc gives large blocks back at once, instead of keeping what the busiest moment took.
GLIBC_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}  # bytes
LOG_LEVELS = {"error": 0, "warning": 1, "info": 2, "verbose": 3}
LOOPBACK_VARIABLE = "COSYTRITON_GRPC_URL"  # tells models where their own server listens
STAND_INS = Path(__file__).parent / "backends"  # of the C++ backends that the embedded server lacks


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs; `profile` is the name of one of `profiles.PROFILES`."""

    repository: Path
    profile: str = CPU.name
    host: str = "127.0.0.1"  # of gRPC and metrics
    http_host: str = "127.0.0.1"  # apart: deeply nested JSON over HTTP can crash Triton
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    log_level: str = "error"
    exit_timeout: int = 30  # seconds that requests in flight get when the server stops
    threads: int = 0  # of each graph; 0: every core
    voices: Path | None = None  # folder of enrolled voices; `voices` beside the repository if None

    @property
    def grpc_url(self) -> str:
        """Where the server's own checks reach it."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"{host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Where the server's metrics are read."""
        return f"http://{self.grpc_url.rsplit(':', 1)[0]}:{self.metrics_port}"

    def ports(self) -> dict[str, int]:
        """Every port by the flag that sets it."""
        return {
            "--grpc-port": self.grpc_port,
            "--http-port": self.http_port,
            "--metrics-port": self.metrics_port,
        }


class TritonServer:
    """One run of tritonserver; a context manager that leaves no process and no shared memory behind."""

    def __init__(self, options: ServerOptions) -> None:
        profile = profile_named(options.profile)
        check_repository(options.repository, profile)
        _check_means(profile)
        self.options = options
        self._folder = Path(tempfile.mkdtemp(prefix="cosytriton-"))
        self._shared_memory = f"{self._folder.name}_"
        # Where a GPU computes, the processes do not share what they compute with.
        self._precedence = None if profile.gpu else self._folder / "precedence"
        if self._precedence:
            self._precedence.touch()
        _lay_out_backends(self._folder / "backends")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it is not ready yet. ServerError when a port is taken."""
        for flag, port in self.options.ports().items():
            _check_port(self.options.host, port, flag)
        # A session of its own: Ctrl-C reaches this process alone, which then lets requests finish.
        self._process = subprocess.Popen(self._command(), env=self._environment(), start_new_session=True)

    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def model_processes(self) -> set[int]:
        """Process ids of the living Python models. Triton never restarts one that died."""
        if self._process is None:
            return set()
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            return {c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE}
        return set()

    def stop(self) -> None:
        """Let requests in flight finish, at most `exit_timeout` seconds, then end the process."""
        if self._process is not None and self.running():
            self._drain()
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.options.exit_timeout + 5)
        self.kill()

    def _drain(self) -> None:
        """Wait for speech in progress: a stopping Triton refuses the models' calls to one another."""
        deadline = time.monotonic() + self.options.exit_timeout
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline and read_metric(self.options.metrics_url, ACTIVE_REQUESTS):
                time.sleep(DRAIN_PERIOD)

    def kill(self) -> None:
        """End the process and its models at once; their clients get a broken connection, not a hang."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        for region in SHARED_MEMORY.glob(f"{self._shared_memory}*"):
            region.unlink(missing_ok=True)

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """Models import from this interpreter's environment; the copied stub finds its libraries by path."""
        libraries = stub_libraries(_triton_folder())
        found = {"PATH": Path(sys.executable).parent, "LD_LIBRARY_PATH": libraries}
        paths = {name: f"{first}:{os.environ.get(name, '')}" for name, first in found.items()}
        own = {LOOPBACK_VARIABLE: self.options.grpc_url, **GLIBC_RETURNS_MEMORY}
        own[THREADS_VARIABLE] = str(self.options.threads)
        if self._precedence is not None:
            own[PRECEDENCE_VARIABLE] = str(self._precedence)
        own["NUMPY_MADVISE_HUGEPAGE"] = "0"  # memory that is reserved and not used stays unused
        if self.options.voices is not None:
            own[VOICES_VARIABLE] = str(self.options.voices.resolve())
        return os.environ | paths | own

    def _command(self) -> list[str]:
        options, triton = self.options, _triton_folder()
        level = LOG_LEVELS[options.log_level]
        command = [
            str(triton / "bin" / "tritonserver"),
            f"--model-repository={options.repository.resolve()}",
            f"--backend-directory={self._folder / 'backends'}",
            f"--cache-directory={triton / 'caches'}",
            f"--repoagent-directory={self._folder}",
            f"--cache-config=local,size={CACHE_BYTES}",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
            f"--http-address={options.http_host}",
            f"--grpc-address={options.host}",
            f"--metrics-address={options.host}",
            *(f"{flag}={port}" for flag, port in options.ports().items()),
            f"--exit-timeout-secs={options.exit_timeout}",
            f"--log-warning={level >= LOG_LEVELS['warning']}",
            f"--log-info={level >= LOG_LEVELS['info']}",
            f"--log-verbose={int(level >= LOG_LEVELS['verbose'])}",
            "--allow-gpu-metrics=false",
        ]
        if options.profile != CPU.name:
            command.append(f"--model-config-name={options.profile}")
        return command


def _triton_folder() -> Path:
    folder = triton_folder()
    if folder is None:
        raise ServerError(
            "The embedded tritonserver is not installed. Run `pip install 'cosytriton[serve]'`, "
            "or serve the repository with the Triton container."
        )
    return folder


def _lay_out_backends(backends: Path) -> None:
    triton = _triton_folder()
    stub = stub_of(triton)
    if not stub.is_file():
        raise ServerError(
            f"The embedded tritonserver has no Python stub for Python {stub.parent.name}; use Python 3.11."
        )
    python = backends / "python"
    python.mkdir(parents=True)
    for source in (*(triton / "backends" / "python").glob("*.*"), stub):
        shutil.copy2(source, python)
    shutil.copytree(STAND_INS, backends, dirs_exist_ok=True)


def _check_means(profile: Profile) -> None:
    """Refuse what this machine or the embedded server has not."""
    if profile.gpu and Machine.here().gpu is None:
        others = " or ".join(other.name for other in PROFILES.values() if not other.gpu)
        raise ServerError(
            f"The profile {profile.name} needs a GPU, and this machine has none. Serve --profile {others}."
        )
    if not (STAND_INS / profile.backend).is_dir():
        raise ServerError(
            f"The profile {profile.name} needs Triton's backend `{profile.backend}`, which the embedded "
            "server does not have. Serve the repository with the Triton container and "
            f"--model-config-name={profile.name}, or choose a profile of ONNX Runtime."
        )


def _check_port(host: str, port: int, flag: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"Port {port} on {host} cannot be used ({error.strerror}). "
                f"Stop what listens there, or choose another with {flag}."
            ) from error


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
