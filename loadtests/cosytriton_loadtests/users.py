"""Locust's users: listeners who ask for speech, in a closed or an open loop.

Closed loop: each user asks again when the answer has ended; a slow server is asked less often. Open loop:
each user is a Poisson source of requests that do not wait for each other, counted from when they were due.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from typing import ClassVar

import grpc.experimental.gevent
import numpy as np
from gevent import Greenlet, GreenletExit
from gevent.pool import Group
from locust import User, task
from locust.runners import WorkerRunner

from cosytriton_client import Client, ClientError
from cosytriton_loadtests.addresses import Addresses
from cosytriton_loadtests.answers import Answers
from cosytriton_loadtests.arrivals import poisson
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.listener import Hearing, now
from cosytriton_loadtests.recorder import Recorder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.statistics import failed, heard
from cosytriton_loadtests.workload import Ask, Workload

# Before the first channel: gRPC would otherwise block every user while one waits. Locust itself makes the
# standard library's sockets, threads and queues cooperative, which is what HTTP needs.
grpc.experimental.gevent.init_gevent()

PAUSE = 1.0  # seconds after a failure, so that a server that refuses is not asked in a tight loop
UNFINISHED = "UnfinishedError"


@cache
def _client(url: str) -> Client:
    """One for all users of a process: gRPC would share the connection anyway, and voices are kept once."""
    return Client(url)


class Listener(User):
    """Asks for what the workload says, and reports "first audio" and "whole speech" to Locust."""

    host = "localhost:8001"
    workload: ClassVar[Workload]
    recorder: ClassVar[Recorder]
    answers: ClassVar[Answers | None] = None
    numbers: ClassVar[Iterator[int]] = count()

    def on_start(self) -> None:
        """Connect, and let the server hear the voices that come again and again."""
        options = self.environment.parsed_options
        number = self._number()
        addresses = Addresses(self.host or "", options.http_url)
        self._clients = {name: _client(addresses.of(name)) for name in self.workload.protocols()}
        self._asks = self.workload.asks(options.seed, number)
        self._requests = Group()
        self._pause = 0.0
        self._due: float | None = None
        self._arrivals: Iterator[float] | None = None
        with suppress(ClientError):  # a server that is not there is what the requests report
            for client in self._clients.values():
                for voice in self.workload.known_voices():
                    client.encode(voice)
        if options.loop == "open":
            rng = np.random.default_rng((options.seed, number, 1))
            self._arrivals = poisson(rng, options.interval, now())

    def on_stop(self) -> None:
        """Let requests end, as long as Locust's stop timeout allows."""
        try:
            self._requests.join(timeout=self.environment.stop_timeout)
        finally:
            self._requests.kill()

    def wait_time(self) -> float:
        """Seconds until the next request."""
        return self._pause if self._due is None else max(0.0, self._due - now())

    @task
    def ask(self) -> None:
        """Make a request; in the open loop, start the one that is due."""
        if self._arrivals is None:
            self._request(next(self._asks), None)
            return
        if self._due is not None:
            self._requests.spawn(self._request, next(self._asks), self._due).link_exception(self._broke)
        self._due = next(self._arrivals)

    def _number(self) -> int:
        """Of this user among those of all workers, so that each asks for something else."""
        runner, number = self.environment.runner, next(self.numbers)
        if not isinstance(runner, WorkerRunner):
            return number
        workers: int = self.environment.parsed_options.expect_workers
        return number * workers + runner.worker_index

    def _request(self, ask: Ask, due: float | None) -> None:
        hearing = Hearing(ask, due)
        try:
            hearing.hear(self._clients[ask.protocol], self.workload.voice(ask))
        except GreenletExit:
            message = "the request was under way when the load test ended: allow more with --stop-timeout."
            self.recorder.add(hearing.sample(UNFINISHED, message))
            raise
        sample = hearing.sample()
        self.recorder.add(sample)
        if self.answers is not None:
            self.answers.keep(sample, hearing.parts)
        self._pause = PAUSE if failed(sample) else 0.0
        self._report(sample)

    def _broke(self, request: Greenlet) -> None:
        """As Locust does for the user's own greenlet."""
        self.environment.events.user_error.fire(
            user_instance=self, exception=request.exception, tb=request.exc_info[2]
        )

    def _report(self, sample: Sample) -> None:
        """Tell Locust; a request that failed counts once, as a failed "whole speech"."""
        if failed(sample):
            self._fire("whole speech", sample, sample.ended, f"{sample.error}: {sample.message}")
            return
        if sample.chunks:
            self._fire("first audio", sample, sample.chunks[0].at)
        if heard(sample):
            self._fire("whole speech", sample, sample.ended)

    def _fire(self, kind: str, sample: Sample, at: float, error: str = "") -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=sample.scenario,
            response_time=(at - sample.intended) * 1000,
            response_length=round(sample.audio_seconds * 1000),
            exception=LoadTestError(error) if error else None,
            context=self.context(),
        )
