"""What is known of each request: raw times, never rounded. One JSON object a line in `samples.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosytriton_loadtests.errors import LoadTestError


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of audio as it came; a unary answer is one chunk.

    Attributes:
        at: seconds since the epoch.
        seconds: duration of its audio.
        audible: seconds into the chunk at which it can first be heard; None: nothing in it can be heard.
    """

    at: float
    seconds: float
    audible: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        scenario: its name in the workload.
        stage: the stage of the load's shape, such as "steady" or "spike".
        protocol: "grpc-stream", "grpc", "http" or "http-stream".
        request: what was asked, enough to ask it again (workload.Ask as a dict).
        intended: when it should have been sent (open loop) or was (closed loop); seconds since the epoch.
        sent: when it was sent.
        ended: when its last byte, its error or its cancellation came.
        chunks: what was heard.
        tokens: speech tokens.
        digest: SHA-256 of all samples as float32; "" when there are none.
        error: kind of the error (name of the client's exception); "" when it was spoken.
        message: text of the error.
        cancelled: the listener left on purpose; its `chunks` are what had come.
    """

    scenario: str
    stage: str
    protocol: str
    request: dict[str, Any]
    intended: float
    sent: float
    ended: float
    chunks: tuple[Chunk, ...] = ()
    tokens: int = 0
    digest: str = ""
    error: str = ""
    message: str = ""
    cancelled: bool = False

    @property
    def audio_seconds(self) -> float:
        """Duration of what was heard."""
        return sum(chunk.seconds for chunk in self.chunks)

    @property
    def first_audio(self) -> float | None:
        """Seconds from the intended time until the first chunk; None: there was none."""
        return self.chunks[0].at - self.intended if self.chunks else None

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Sample:
        """From what `line` wrote."""
        return cls(**fields | {"chunks": tuple(Chunk(**chunk) for chunk in fields["chunks"])})


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Append to the file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{sample.line()}\n" for sample in samples)


def read_samples(path: Path) -> Iterator[Sample]:
    """Every request of a run, in the order in which they ended.

    Raises:
        LoadTestError: there is no such file, or a line is none of ours.
    """
    if not path.is_file():
        raise LoadTestError(f"{path}: there are no samples; give the folder of a load test that has run.")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Sample.of(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise LoadTestError(f"{path}, line {number}: this is no sample ({error}).") from error
