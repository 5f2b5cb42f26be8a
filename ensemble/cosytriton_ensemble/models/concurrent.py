"""The frame of a model that works on many requests at once and computes little itself."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.requests import ActiveRequests, Sender, read
from cosytriton_ensemble.models.setting import Setting
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Feed, Stage


class ConcurrentModel(ABC):
    """One thread for each request. The gauge of active requests tells when the server may stop."""

    @abstractmethod
    def stage_of(self, pipeline: Pipeline) -> Stage:
        """The model's own declaration."""

    @abstractmethod
    def answer(self, feed: Feed, sender: Sender) -> None:
        """Send every response and the end; what is raised becomes the end."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the other models and find the voices."""
        self.setting = Setting.of(args)
        self.stage = self.stage_of(self.setting.pipeline)
        self.models = Loopback()
        self.voices, self.checkpoint = self.setting.voices(), self.setting.checkpoint
        self._active = ActiveRequests(self.stage)

    def finalize(self) -> None:
        """End the connection and free the gauge."""
        self.models.close()
        self._active.close()

    def execute(self, requests: list[Any]) -> None:
        """Return at once, so that requests do not wait for one another."""
        for request in requests:
            self.begin(read(request, self.stage), Sender(request))

    def begin(self, feed: Feed, sender: Sender) -> None:
        """Start to answer a request on a thread of its own."""
        threading.Thread(target=self.serve, args=(feed, sender), daemon=True).start()

    def serve(self, feed: Feed, sender: Sender) -> None:
        """Answer a request, or end it with the error."""
        with self._active.counting(), sender.guard():
            self.answer(feed, sender)
