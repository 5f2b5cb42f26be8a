"""The frame of a model that works on many requests at once and computes little itself."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import QueueFullError
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.metrics import Readings, RequestMetrics
from cosytriton_ensemble.models.requests import Sender, read
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Feed, Stage


class ConcurrentModel(ABC):
    """One thread for each request. The metric of active requests tells when the server may stop."""

    @abstractmethod
    def stage_of(self, pipeline: Pipeline) -> Stage:
        """The model's own declaration."""

    @abstractmethod
    def answer(self, feed: Feed, sender: Sender) -> None:
        """Send every response and the end; what is raised becomes the end."""

    def readings(self) -> Readings:
        """What the model publishes of itself, beside what becomes of its requests."""
        return {}

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the other models and find the voices."""
        self.setting = Setting.of(args)
        self.stage = self.stage_of(self.setting.pipeline)
        self.models = Loopback()
        self.voices, self.checkpoint = self.setting.voices(), self.setting.checkpoint
        self.metrics = RequestMetrics(self.stage, self.readings)

    def finalize(self) -> None:
        """End the connection and free the metrics."""
        self.models.close()
        self.metrics.close()

    def execute(self, requests: list[Any]) -> None:
        """Return at once, so that requests do not wait for one another."""
        for request in requests:
            # A probe is no user's request: its deliberate error would count as one of theirs.
            metrics = None if request.request_id() == names.PROBE else self.metrics
            self.begin(read(request, self.stage), Sender(request, metrics))

    def begin(self, feed: Feed, sender: Sender) -> None:
        """Start to answer a request on a thread of its own; refuse it where the server is stopping."""
        with sender.guard():
            if _stopping():
                raise QueueFullError("The server is stopping and takes no new requests; ask another one.")
            threading.Thread(target=self.serve, args=(feed, sender), daemon=True).start()

    def serve(self, feed: Feed, sender: Sender) -> None:
        """Answer a request, or end it with the error."""
        with sender.counting(), sender.guard():
            self.answer(feed, sender)


def _stopping() -> bool:
    file = os.environ.get(names.DRAIN_VARIABLE)
    return file is not None and Path(file).exists()
