"""tritonserver as a child process: its command line, its start, its end."""

from __future__ import annotations

import contextlib
import os
import re
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
from typing import Literal

import psutil

from cosytriton_ensemble.errors import InputError, ServerError
from cosytriton_ensemble.installation import Installation
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.metrics import ACTIVE_REQUESTS, ACTIVE_SLOTS, read_metric
from cosytriton_ensemble.names import (
    DRAIN_VARIABLE,
    LM_VARIABLE,
    LOOPBACK_VARIABLE,
    PRECEDENCE_VARIABLE,
    THREADS_VARIABLE,
    TLS_VARIABLE,
    VOICES_VARIABLE,
)
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import CPU, PROFILES, Profile, profile_named
from cosytriton_ensemble.repository import check_repository, family_of, native_manifests
from cosytriton_ensemble.tls import Tls

SHARED_MEMORY = Path("/dev/shm")
CACHE_BYTES = 256 << 20  # Triton's response cache for the voice stages
DRAIN_PERIOD = 0.2  # seconds between two looks at the requests in flight
UNLOAD_SECONDS = 8  # for Triton to end once nothing is spoken; 24.10 sometimes hangs there
# glibc gives large blocks back at once, instead of keeping what the busiest moment took.
GLIBC_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}  # bytes
LOG_LEVELS = {"error": 0, "warning": 1, "info": 2, "verbose": 3}
EVERYWHERE = ("0.0.0.0", "::")  # addresses to listen on, not to call
ADMIN_HEADER = "admin-key"  # gRPC: triton-grpc-protocol-admin-key
ADMIN_PROTOCOLS = "model-repository,shared-memory,logging,trace"
ADMIN_KEY = re.compile(r"[A-Za-z0-9_.-]{16,}")  # what both headers and Triton's own flag carry unchanged
Part = Literal["all", "lm", "sound"]
"""What a server loads: everything, the language model alone, or everything else."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs.

    Attributes:
        repository: the model repository.
        profile: the name of one of `profiles.PROFILES`.
        host, http_host, metrics_host: addresses to listen on, of metrics `host` if None. HTTP has its own
            because deeply nested JSON can crash Triton.
        grpc_port, http_port, metrics_port: ports there.
        log_level: a key of `LOG_LEVELS`.
        exit_timeout: seconds that requests in flight get when the server stops.
        threads: of each graph; 0: every core.
        voices: folder of enrolled voices; `voices` beside the repository if None.
        tls: of gRPC.
        admin_key: file with the key that changes of the server need.
        trace: settings of Triton's `--trace-config`.
        part: what is loaded.
        lm_url: `host:port` of the server of the language model, for the part "sound".

    """

    repository: Path
    profile: str = CPU.name
    host: str = "127.0.0.1"
    http_host: str = "127.0.0.1"
    metrics_host: str | None = None
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    log_level: str = "error"
    exit_timeout: int = 30
    threads: int = 0
    voices: Path | None = None
    tls: Tls | None = None
    admin_key: Path | None = None
    trace: tuple[str, ...] = ()
    part: Part = "all"
    lm_url: str | None = None

    @property
    def own_host(self) -> str:
        """The name under which the server's own models and checks call it; certificates know no 127.0.0.1."""
        here = self.host in (*EVERYWHERE, "127.0.0.1")
        return self.host if not here else "localhost" if self.tls else "127.0.0.1"

    @property
    def grpc_url(self) -> str:
        """Where the server's own models and checks reach it."""
        return f"{self.own_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Where the server's metrics are read."""
        host = self.metrics_host or self.host
        return f"http://{'127.0.0.1' if host in EVERYWHERE else host}:{self.metrics_port}"

    def ports(self) -> dict[str, tuple[str, int]]:
        """Every address and port by the flag that sets the port."""
        return {
            "--grpc-port": (self.host, self.grpc_port),
            "--http-port": (self.http_host, self.http_port),
            "--metrics-port": (self.metrics_host or self.host, self.metrics_port),
        }

    def flags(self) -> list[str]:
        """Those of tritonserver that these options alone decide."""
        level = LOG_LEVELS[self.log_level]
        return [
            *(f"{flag}={port}" for flag, (_, port) in self.ports().items()),
            f"--grpc-address={self.host}",
            f"--http-address={self.http_host}",
            f"--metrics-address={self.metrics_host or self.host}",
            f"--exit-timeout-secs={self.exit_timeout}",
            f"--log-warning={level >= LOG_LEVELS['warning']}",
            f"--log-info={level >= LOG_LEVELS['info']}",
            f"--log-verbose={int(level >= LOG_LEVELS['verbose'])}",
            *(self.tls.flags() if self.tls else ()),
            *(f"--trace-config={setting}" for setting in self.trace),
            *(_restrictions(self.admin_key) if self.admin_key else ()),
        ]

    def variables(self) -> dict[str, str]:
        """The environment in which its models find one another, and the voices."""
        given = {
            LOOPBACK_VARIABLE: self.grpc_url,
            LM_VARIABLE: self.lm_url,
            TLS_VARIABLE: self.tls and self.tls.folder.resolve(),
            VOICES_VARIABLE: self.voices and self.voices.resolve(),
            THREADS_VARIABLE: self.threads,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


class TritonServer:
    """One run of tritonserver; a context manager that leaves no process and no shared memory behind."""

    def __init__(self, options: ServerOptions) -> None:
        profile = profile_named(options.profile)
        check_repository(options.repository, profile)
        self._triton = Installation.here()
        _check_means(profile, self._triton)
        self._native = native_manifests(options.repository, profile)
        _check_part(options)
        if profile.plan is None:
            self._triton.check_opset(max(manifest.opset or 0 for manifest in self._native))
        if options.tls is not None:
            options.tls.check(options.own_host)
        self.options = options
        self._folder = Path(tempfile.mkdtemp(prefix="cosytriton-"))
        self._shared_memory = f"{self._folder.name}_"
        # Where a GPU computes, the processes do not share what they compute with.
        self._precedence = None if profile.gpu else self._folder / "precedence"
        if self._precedence:
            self._precedence.touch()
        self._stopping = self._folder / "stopping"  # is there when no new speech may begin
        self._backends = self._triton.backends(self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it is not ready yet. ServerError when a port is taken."""
        for flag, (host, port) in self.options.ports().items():
            _check_port(host, port, flag)
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
                self._process.wait(UNLOAD_SECONDS)
        self.kill()

    def _drain(self) -> None:
        """Let no new speech begin, and wait for what is in progress.

        Its models still call one another, which a stopping Triton would refuse.
        """
        self._stopping.touch()
        deadline = time.monotonic() + self.options.exit_timeout
        with contextlib.suppress(OSError):
            busy = True  # what has just begun does not show yet
            while busy and time.monotonic() < deadline:
                time.sleep(DRAIN_PERIOD)
                busy = self._busy()

    def _busy(self) -> bool:
        """Whether speech is made here, for clients or, of a language model alone, for another server."""
        return any(read_metric(self.options.metrics_url, name) for name in (ACTIVE_REQUESTS, ACTIVE_SLOTS))

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
        first = {"PATH": str(Path(sys.executable).parent), "LD_LIBRARY_PATH": self._triton.libraries}
        paths = {name: ":".join(filter(None, (path, os.environ.get(name)))) for name, path in first.items()}
        own = self.options.variables() | GLIBC_RETURNS_MEMORY | {DRAIN_VARIABLE: str(self._stopping)}
        if self._precedence is not None:
            own[PRECEDENCE_VARIABLE] = str(self._precedence)
        own["NUMPY_MADVISE_HUGEPAGE"] = "0"  # memory that is reserved and not used stays unused
        return os.environ | paths | own

    def _command(self) -> list[str]:
        options, triton = self.options, self._triton.folder
        command = [
            str(triton / "bin" / "tritonserver"),
            f"--model-repository={options.repository.resolve()}",
            f"--backend-directory={self._backends}",
            f"--cache-directory={triton / 'caches'}",
            f"--repoagent-directory={self._folder}",
            f"--cache-config=local,size={CACHE_BYTES}",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
            f"--allow-gpu-metrics={PROFILES[options.profile].gpu}",
            *options.flags(),
            *_loads(options),
        ]
        if options.profile != CPU.name:
            command.append(f"--model-config-name={options.profile}")
        if any(manifest.portable for manifest in self._native):
            command.append("--backend-config=tensorrt,version-compatible=true")
        return command


def _loads(options: ServerOptions) -> list[str]:
    """The flags that name the models of a part."""
    pipeline = pipeline_of(family_of(options.repository))
    models = (*pipeline.native_stages, *pipeline.python_stages, *pipeline.ensembles)
    names = {model.name for model in models if (model is pipeline.speech_lm) == (options.part == "lm")}
    flags = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in sorted(names))]
    return flags if options.part != "all" else []


def _restrictions(file: Path) -> list[str]:
    """The flags that keep whoever lacks the key from changing the server; InputError for a weak one."""
    key = file.read_text(encoding="utf-8").strip()
    if not ADMIN_KEY.fullmatch(key):
        raise InputError(
            f"{file} holds no admin key: give at least 16 letters, digits, underscores, dots or hyphens, "
            "as `openssl rand -hex 32` does."
        )
    names = ("grpc-restricted-protocol", "http-restricted-api")
    return [f"--{name}={ADMIN_PROTOCOLS}:{ADMIN_HEADER}={key}" for name in names]


def _check_part(options: ServerOptions) -> None:
    if (options.part == "sound") != (options.lm_url is not None):
        raise InputError(
            f"The part {options.part!r} with --lm-url={options.lm_url}: the part `sound`, and it alone, "
            "needs --lm-url HOST:PORT, where a server with --part=lm listens."
        )


def _check_means(profile: Profile, triton: Installation) -> None:
    """Refuse what this machine or its Triton has not."""
    if profile.gpu and Machine.here().gpu is None:
        others = " or ".join(other.name for other in PROFILES.values() if not other.gpu)
        raise ServerError(
            f"The profile {profile.name} needs a GPU, and this machine has none. Serve --profile {others}."
        )
    if not triton.has(profile.backend):
        raise ServerError(
            f"The profile {profile.name} needs Triton's backend `{profile.backend}`, which the Triton in "
            f"{triton.folder} does not have. Serve in NVIDIA's Triton container, or choose a profile of ONNX "
            "Runtime."
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
