"""The files of one run: what was asked, what each request met, what the server said meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.samples import Sample, read_samples


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the load's shape.

    Attributes:
        name: of the stage.
        start: seconds since the epoch.
        seconds: its length.
        users: Locust users in it.
        rate: requests in a second that were intended; None in a closed loop.
    """

    name: str
    start: float
    seconds: float
    users: int
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What was run, where.

    Attributes:
        url: of the server, as the client takes it.
        metrics_url: of Triton's metrics, or "" when nobody may read them.
        loop: "closed" or "open".
        warm_up: seconds cut off at the start.
        stages: in their order.
        options: what the run was called with.
        machine: description of the load generator's machine, and the server's where it is the same.
    """

    url: str
    metrics_url: str
    loop: str
    warm_up: float
    stages: tuple[Stage, ...]
    options: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder with `run.json`, `samples.jsonl`, `server.jsonl` and `report.html`."""

    path: Path

    @property
    def samples_file(self) -> Path:
        """Raw samples of every request."""
        return self.path / "samples.jsonl"

    @property
    def server_file(self) -> Path:
        """What the server's metrics and processes said, one look a line."""
        return self.path / "server.jsonl"

    @property
    def report_file(self) -> Path:
        """The page for people."""
        return self.path / "report.html"

    def write_info(self, info: RunInfo) -> None:
        """Write `run.json`."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "run.json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")

    def info(self) -> RunInfo:
        """What was run.

        Raises:
            LoadTestError: the folder holds no run.
        """
        try:
            fields = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return RunInfo(**fields | {"stages": tuple(Stage(**stage) for stage in fields["stages"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LoadTestError(f"{self.path}: this is no folder of a load test ({error}).") from error

    def samples(self, *, warm: bool = True) -> Iterator[Sample]:
        """Every request; `warm` leaves out those that were intended during the warm-up."""
        info = self.info()
        begin = info.stages[0].start + info.warm_up if warm and info.stages else 0.0
        return (sample for sample in read_samples(self.samples_file) if sample.intended >= begin)
