"""Brings the raw samples of all Locust processes into one place, without losing any at the end.

Samples go through Locust's own messages: from workers to the master in batches, in one process directly. When
it quits, Locust gives workers half a second for their last word; so the master asks each of them to finish,
and waits until what it had in flight has ended and has come. Samples that are missing then fail the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from cosytriton_loadtests.samples import Sample

log = logging.getLogger(__name__)

SAMPLES, FINISH, FINISHED = "cosytriton-samples", "cosytriton-finish", "cosytriton-finished"
PERIOD = 0.5  # seconds between two batches
MARGIN = 15.0  # seconds beyond Locust's stop timeout that workers may take to finish
INCOMPLETE = 3  # exit status of Locust when samples are missing


class Recorder:
    """Takes samples in any Locust process and hands them to `write` in the master, or in the single one.

    Args:
        environment: Locust's, with its runner.
        write: called with each batch.
    """

    def __init__(self, environment: Environment, write: Callable[[list[Sample]], None]) -> None:
        assert environment.runner is not None
        self._environment, self._runner, self._write = environment, environment.runner, write
        self._pending: list[Sample] = []
        self._sent = 0
        at_stop = environment.events.test_stop
        if isinstance(self._runner, MasterRunner):
            self._workers = _Workers(self._runner)
            at_stop.add_listener(self._await_workers)  # type: ignore[no-untyped-call]
        else:
            at_stop.add_listener(self._last_flush)  # type: ignore[no-untyped-call]
            gevent.spawn(self._flush_for_ever)
        if isinstance(self._runner, WorkerRunner):
            self._runner.register_message(FINISH, self._finish)
        else:
            self._runner.register_message(SAMPLES, self._receive)

    def add(self, sample: Sample) -> None:
        """Take a sample."""
        self._pending.append(sample)

    def _flush(self) -> None:
        batch, self._pending = self._pending, []
        if batch:
            self._sent += len(batch)
            self._runner.send_message(SAMPLES, {"samples": [asdict(sample) for sample in batch]})

    def _flush_for_ever(self) -> None:
        while True:
            gevent.sleep(PERIOD)
            self._flush()

    def _last_flush(self, **_: Any) -> None:
        self._flush()
        if isinstance(self._runner, WorkerRunner):
            self._runner.send_message(FINISHED, {"sent": self._sent})

    def _receive(self, msg: Any, **_: Any) -> None:
        batch = [Sample.of(fields) for fields in msg.data["samples"]]
        if isinstance(self._runner, MasterRunner):
            self._workers.received[msg.node_id] += len(batch)
        self._write(batch)

    def _finish(self, **_: Any) -> None:
        """In a worker: end all users, hand over what is left, say how much it was."""
        self._runner.stop()
        self._last_flush()  # again: one that had stopped already does not stop twice

    def _await_workers(self, **_: Any) -> None:
        """In the master: nobody quits before every worker has finished."""
        if missing := self._workers.finish(self._environment.stop_timeout + MARGIN):
            log.error("samples are missing of the workers %s: they ended, or did not finish", missing)
            self._environment.process_exit_code = INCOMPLETE


class _Workers:
    """What the master knows of its workers."""

    def __init__(self, runner: MasterRunner) -> None:
        self._runner = runner
        self.received: Counter[str] = Counter()  # samples of each
        self._sent: dict[str, int] = {}  # what those that have finished say
        self._asked: set[str] = set()
        self._done = Event()
        runner.register_message(FINISHED, self._finished)

    def finish(self, seconds: float) -> set[str]:
        """Let all finish; those whose samples are not complete."""
        self._asked = {node.id for node in self._runner.clients.all}
        for name in self._asked:
            self._sent.pop(name, None)
        if self._asked:
            self._done.clear()
            self._runner.send_message(FINISH)
            self._done.wait(seconds)
        return {
            name for name in self._asked | set(self.received) if self._sent.get(name) != self.received[name]
        }

    def _finished(self, msg: Any, **_: Any) -> None:
        self._sent[msg.node_id] = msg.data["sent"]
        if self._asked <= self._sent.keys():
            self._done.set()
