"""The frame of a model that works on many requests at once and computes little itself."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.requests import ActiveRequests, Sender, read
from cosytriton_ensemble.spec import Feed, Stage


class ConcurrentModel(ABC):
    """One thread for each request. The gauge of active requests tells when the server may stop."""

    stage: ClassVar[Stage]

    @abstractmethod
    def answer(self, feed: Feed, sender: Sender, models: Loopback) -> None:
        """Send every response and the end; what is raised becomes the end."""

    def initialize(self, args: dict[str, str]) -> None:  # noqa: ARG002  (Triton's signature)
        """Connect to the other models."""
        self._active = ActiveRequests(self.stage)
        self._models = Loopback()

    def finalize(self) -> None:
        """End the connection and free the gauge."""
        self._models.close()
        self._active.close()

    def execute(self, requests: list[Any]) -> None:
        """Return at once, so that requests do not wait for one another."""
        for request in requests:
            arguments = (read(request, self.stage), Sender(request))
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, feed: Feed, sender: Sender) -> None:
        with self._active.counting(), sender.guard():
            self.answer(feed, sender, self._models)
