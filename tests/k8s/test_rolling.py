"""Rolling upgrades and a kill -9 behind HAProxy, while clients listen: no request fails, no sample is lost.

The steps are the chart's: a server leaves the proxy, goes on for `drainSeconds`, gets SIGTERM; another one
starts, is asked by `cosytriton health --ready`, and only then gets requests.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cosytriton_client import Client, ClientError, Request, Timeout, Voice
from cosytriton_client._grpc import GrpcTransport
from cosytriton_client._transport import Tensors
from cosytriton_ensemble.metrics import ACTIVE_REQUESTS, read_metric
from cosytriton_ensemble.server import free_ports

CONFIGURATION = Path(__file__).parents[2] / "k8s" / "rollout" / "haproxy.cfg"
SECONDS = float(
    os.environ.get("COSYTRITON_ROLLOUT_SECONDS", "600")
)  # of listening; 60: about as long as the steps
UPGRADES = 2 if SECONDS >= 300 else 1
DRAIN_SECONDS = 1.0  # the chart's default is 10, for proxies that learn of it later than this one
LISTENERS = 4
RETRIES = 4
# A request that ends with its server must end at once: clients do not wait for what will not come.
HANG_SECONDS = 10.0
# Of full scale. Batches of other shapes add in another order; mixed chunks differ by 0.1, lost ones in size.
ROUNDING = 1e-3
SHARED_MEMORY = re.compile(r"shm-region-prefix-name=(\S+)")
TEXTS = (
    "one two three four five",
    "This is voice number five. Please wait for your server, and then call number zero two.",
    "Please wait for your server. " * 4,
)

pytestmark = [
    pytest.mark.rollout,
    pytest.mark.timeout(SECONDS + 900),
    pytest.mark.skipif(
        not shutil.which("haproxy"), reason="haproxy is not installed (Debian: apt-get install haproxy)"
    ),
]

Serve = Callable[..., AbstractContextManager[Any]]
Samples = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ask:
    """One kind of request; its answer is the same each time."""

    text: str
    seed: int
    streamed: bool

    def heard(self, client: Client, voice: Voice) -> Samples:
        if not self.streamed:
            return client.synthesize(self.text, voice, seed=self.seed).samples
        return np.concatenate([c.samples for c in client.stream(self.text, voice, seed=self.seed)])


ASKS = [Ask(text, seed, streamed) for text in TEXTS for seed in (0, 1) for streamed in (True, True, False)]


@dataclass
class Proxy:
    """HAProxy with the configuration of k8s/rollout."""

    port: int
    socket: Path

    def command(self, words: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self.socket))
            connection.sendall(f"{words}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def drain(self, name: str) -> None:
        assert self.command(f"set server speech/{name} state drain").strip() == ""

    def put(self, name: str, port: int) -> None:
        """Give a place to a server that has become ready, and wait until it gets requests."""
        assert "error" not in self.command(f"set server speech/{name} addr 127.0.0.1 port {port}").lower()
        assert self.command(f"set server speech/{name} state ready").strip() == ""
        _wait_for(lambda: self.servers()[name]["status"] == "UP", 10)

    def servers(self) -> dict[str, dict[str, str]]:
        """What the proxy knows of each server."""
        head, *rows = self.command("show stat").removeprefix("# ").strip().splitlines()
        found = [dict(zip(head.split(","), row.split(","), strict=False)) for row in rows]
        return {row["svname"]: row for row in found if row["pxname"] == "speech" and row["svname"] in "ab"}


@contextmanager
def haproxy(folder: Path, ports: dict[str, int]) -> Iterator[Proxy]:
    (port,) = free_ports(1)
    proxy = Proxy(port, folder / "socket")
    environment = os.environ | {
        "COSYTRITON_SOCKET": str(proxy.socket),
        "COSYTRITON_LISTEN": f"127.0.0.1:{port}",
        **{f"COSYTRITON_{name.upper()}": f"127.0.0.1:{number}" for name, number in ports.items()},
    }
    process = subprocess.Popen(["haproxy", "-db", "-f", str(CONFIGURATION)], env=environment)
    try:
        _wait_for(lambda: proxy.socket.exists() or process.poll() is not None, 10)
        assert process.poll() is None
        yield proxy
    finally:
        process.terminate()
        process.wait(10)


@dataclass
class Pods:
    """Two servers, each in its place behind the proxy, and what is done to them."""

    serve: Serve
    repository: Path
    folder: Path
    places: dict[str, tuple[Any, ExitStack]] = field(default_factory=dict)
    count: int = 0
    speaking_at_the_end: int = 0  # requests in flight at each SIGTERM, added up

    def start(self, name: str) -> int:
        """Start a server for a place and wait until it speaks; its gRPC port."""
        self.count += 1
        stack = ExitStack()
        log = self.folder / f"{name}{self.count}.log"
        running = stack.enter_context(self.serve(self.repository, log, "--exit-timeout=20"))
        self.places[name] = running, stack
        health = [str(Path(sys.executable).with_name("cosytriton")), "health", "--ready"]
        subprocess.run([*health, f"--url={running.grpc_url}", "--deadline=60"], check=True, timeout=120)
        return int(running.grpc_port)

    def stop(self, name: str) -> None:
        """SIGTERM, and wait for the end; the server lets its requests finish."""
        running, stack = self.places.pop(name)
        self.speaking_at_the_end += int(
            read_metric(f"http://localhost:{running.metrics_port}", ACTIVE_REQUESTS)
        )
        stack.close()
        assert running.process.returncode == 0, running.log.read_text()

    def kill(self, name: str) -> None:
        """SIGKILL to all of the pod's processes at once, as when its node is lost."""
        running, stack = self.places.pop(name)
        keeper = psutil.Process(running.process.pid)
        family = [keeper, *keeper.children(recursive=True)]
        left = {name for process in family for name in SHARED_MEMORY.findall(" ".join(process.cmdline()))}
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()  # so that none of them sees another die
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, 10)
        stack.close()
        for region in (file for prefix in left for file in Path("/dev/shm").glob(f"{prefix}*")):
            region.unlink()  # in a cluster the pod's memory volume goes with it


class Watched(GrpcTransport):
    """Counts what broke off, whether or not the client sends it again."""

    broken = 0

    def infer(self, request: Request) -> Tensors:
        with self._counting():
            return super().infer(request)

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        with self._counting():
            yield from super().stream(request, further)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except ClientError:
            self.broken += 1
            raise


@dataclass
class Listeners:
    """Clients who ask without a pause and compare what they hear with what was heard alone."""

    port: int
    voice: Voice
    alone: dict[Ask, Samples]
    retrying: threading.Event = field(default_factory=threading.Event)  # until then no request is sent again
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    killed_at: float = 0.0
    heard: int = 0
    broken: int = 0  # requests that ended with the killed server, those included that the client sent again
    repeated: int = 0  # of these the ones that had sounded
    failures: list[str] = field(default_factory=list)
    waits: list[float] = field(
        default_factory=list
    )  # seconds from the kill to the end of one that had sounded

    def listen(self, number: int) -> None:
        choice = random.Random(number)
        timeout = Timeout(first_chunk=60, chunk=60)
        transports = [Watched("localhost", self.port, timeout) for _ in range(2)]
        once, again = (
            Client(transport=one, retries=n) for one, n in zip(transports, (0, RETRIES), strict=True)
        )
        with once, again:
            while not self.done.is_set():
                ask = choice.choice(ASKS)
                try:
                    self._compare(ask, self._asked(again if self.retrying.is_set() else once, ask))
                except ClientError as error:
                    self._note(f"{ask}: {type(error).__name__}: {error}")
            with self.lock:
                self.broken += sum(transport.broken for transport in transports)

    def _compare(self, ask: Ask, samples: Samples) -> None:
        expected = self.alone[ask]
        if samples.shape != expected.shape:
            self._note(f"{ask}: {samples.size} samples, alone {expected.size}")
        elif (difference := float(np.abs(samples - expected).max())) > ROUNDING:
            self._note(f"{ask}: differs by {difference} from the same alone")
        with self.lock:
            self.heard += 1

    def _asked(self, client: Client, ask: Ask) -> Samples:
        """The answer; what broke off by the kill after it had sounded is asked for again, as a user would."""
        begun = time.monotonic()
        try:
            return ask.heard(client, self.voice)
        except ClientError:
            if begun > self.killed_at:
                raise
            with self.lock:
                self.waits.append(time.monotonic() - self.killed_at)
                self.repeated += 1
            return ask.heard(client, self.voice)

    def _note(self, failure: str) -> None:
        with self.lock:
            self.failures.append(failure)

    @contextmanager
    def listening(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.listen, args=(i,), daemon=True) for i in range(LISTENERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.done.set()
            for thread in threads:
                thread.join(120)
            assert not any(thread.is_alive() for thread in threads), "a listener hangs"


def test_streams_over_rolling_upgrades_and_a_kill(
    demo_repository: Path, serve: Serve, voice: Voice, tmp_path: Path
) -> None:
    pods = Pods(serve, demo_repository, tmp_path)
    ports = {name: pods.start(name) for name in ("a", "b")}
    with Client(f"localhost:{ports['a']}") as client:
        alone = {ask: ask.heard(client, voice) for ask in ASKS}
    with haproxy(tmp_path, ports) as proxy:
        listeners = Listeners(proxy.port, voice, alone)
        began = time.monotonic()
        with listeners.listening():
            for upgrade in range(UPGRADES):
                _wait_until(began + upgrade * SECONDS / (UPGRADES + 1))
                for name in pods.places.copy():
                    _replace(pods, proxy, name)
            assert listeners.failures == []
            assert listeners.repeated == 0
            during_upgrades, in_flight = listeners.heard, pods.speaking_at_the_end
            _wait_until(began + UPGRADES * SECONDS / (UPGRADES + 1))
            _kill_one(pods, proxy, listeners)
            _wait_until(began + SECONDS)
        spread = {name: int(row["stot"]) for name, row in proxy.servers().items()}
    for name in list(pods.places):
        pods.stop(name)
    print(
        f"{listeners.heard} answers in {time.monotonic() - began:.0f} s; {during_upgrades} by the end of "
        f"{UPGRADES} upgrades, {in_flight} in flight at a SIGTERM; the kill broke {listeners.broken}, "
        f"{listeners.repeated} had sounded, at most {max(listeners.waits, default=0):.2f} s after it; "
        f"requests by place: {spread}"
    )
    assert in_flight > 0
    assert min(spread.values()) > 0.2 * sum(spread.values())
    assert listeners.failures == []
    assert during_upgrades > 10
    assert all(wait < HANG_SECONDS for wait in listeners.waits)


def _replace(pods: Pods, proxy: Proxy, name: str) -> None:
    """One pod of a rolling upgrade, in the chart's order."""
    proxy.drain(name)
    time.sleep(DRAIN_SECONDS)
    pods.stop(name)
    proxy.put(name, pods.start(name))


def _kill_one(pods: Pods, proxy: Proxy, listeners: Listeners) -> None:
    """Any of the two, at any time; then another one comes into its place."""
    name = random.choice(sorted(pods.places))
    listeners.retrying.set()
    time.sleep(random.uniform(10, 13))  # by then every request is one that is sent again
    listeners.killed_at = time.monotonic()
    pods.kill(name)
    proxy.put(name, pods.start(name))


def _wait_for(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
