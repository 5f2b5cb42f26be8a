"""Keeps a Triton server serving: starts it, waits until it really speaks, restarts it when it hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.health import HealthCheck, NotReadyYet
from cosytriton_ensemble.server import ServerOptions, TritonServer

log = logging.getLogger(__name__)

START_SECONDS = 900  # a full-size checkpoint on a slow disk
READY_SECONDS = 300  # the readiness check; full-size FP32 on a laptop speaks slowly
LIVENESS_PERIOD = 20  # seconds between two cheap inferences through every model
LIVENESS_SECONDS = 60  # the liveness check; under load it queues behind a batch of speech
WATCH_PERIOD = 0.5  # seconds between two looks at the processes
MAX_RESTARTS = 5  # in a row, without once becoming ready


class Supervisor:
    """Runs one server until `stop()` is called. `on_ready` is called each time it is ready to speak."""

    def __init__(self, options: ServerOptions, on_ready: Callable[[str], None] = lambda _: None) -> None:
        self._options = options
        self._on_ready = on_ready
        self._stop = threading.Event()
        tls = options.tls.folder if options.tls else None
        self._check = HealthCheck(options.grpc_url, LIVENESS_SECONDS, tls)
        self._ready_check = HealthCheck(options.grpc_url, READY_SECONDS, tls)
        # Beside a language model in another server, which may come later, every failure is one of these.
        self._not_yet = NotReadyYet if options.lm_url is None else ServerError
        self._models: set[int] = set()  # process ids of the models of the server that became ready

    def stop(self) -> None:
        """Let `run` end; safe to call from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Serve until stopped. ServerError when the server does not become ready."""
        restarts = 0
        with TritonServer(self._options) as server:
            while not self._stop.is_set():
                server.start()
                if not self._becomes_ready(server):
                    restarts += 1
                    if restarts > MAX_RESTARTS:
                        raise ServerError(
                            f"The server did not become ready in {restarts} attempts; see its log."
                        )
                else:
                    restarts = 0
                    self._watch(server)
                if not self._stop.is_set():
                    server.kill()

    def _becomes_ready(self, server: TritonServer) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._stop.wait(WATCH_PERIOD):
            if not server.running():
                raise ServerError(
                    "tritonserver ended before it was ready; its own message stands above "
                    "(more of it with --log-level info)."
                )
            try:
                version = self._check.server_version()
                self._ready_check.ready()
            except self._not_yet:
                continue
            self._models = server.model_processes()
            self._on_ready(version)
            return True
        return False

    def _watch(self, server: TritonServer) -> None:
        """Return when the server must be restarted, or `stop` was called."""
        checker = _Periodic(self._check.alive, LIVENESS_PERIOD)
        with checker:
            while not self._stop.wait(WATCH_PERIOD):
                if not server.running():
                    log.warning("tritonserver ended; starting it again")
                    return
                if dead := self._models - server.model_processes():
                    log.warning("model process %s died; starting the server again", sorted(dead))
                    return
                if checker.failure is not None:
                    log.warning("liveness check failed (%s); starting the server again", checker.failure)
                    return


class _Periodic:
    """Calls a check every `period` seconds on a thread of its own; keeps the second failure in a row."""

    def __init__(self, check: Callable[[], None], period: float) -> None:
        self.failure: Exception | None = None
        self._check = check
        self._period = period
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="liveness")

    def _run(self) -> None:
        failed = False
        while not self._done.wait(self._period):
            try:
                self._check()
                failed = False
            except ServerError as error:
                if failed:
                    self.failure = error
                failed = True

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
