"""The mix of requests: which texts, voices and protocols, how often. `workload_file` reads it from TOML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cosytriton_client import Voice
from cosytriton_loadtests.errors import LoadTestError

Protocol = Literal["grpc-stream", "grpc", "http", "http-stream"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
STREAMS = ("grpc-stream", "http-stream")
DEFAULT_WORKLOAD = Path(__file__).parents[1] / "workload.toml"

# Requests that the server has to refuse, one of them at random.
BAD_INPUTS: dict[str, dict[str, Any]] = {
    "speed": {"speed": 50.0},
    "mode": {"mode": "backwards"},
    "max_tokens": {"max_tokens": -1},
}
_NUMBERS = 2**53  # seeds stay exact in any reader of JSON
_LAST_CHUNK = 3  # a listener who leaves does so after 1 to 3 chunks
_NOISE = 1e-4  # -80 dBFS: another recording for the server, the same one for the ear


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, enough to make it again.

    Attributes:
        scenario: its name in the workload.
        protocol: one of `PROTOCOLS`.
        text: what to say.
        voice: its name in the workload.
        alteration: number of the variant of the recording; 0: as it is.
        options: keyword arguments of the client's call, the seed among them.
        cancel_after: chunks after which the listener leaves; 0: stays to the end.
        bad: what is wrong with it, a key of `BAD_INPUTS`; "": nothing.
    """

    scenario: str
    protocol: str
    text: str
    voice: str
    alteration: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    cancel_after: int = 0
    bad: str = ""

    @property
    def streams(self) -> bool:
        """Whether the answer comes in chunks."""
        return self.protocol in STREAMS


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of the workload: a recording, or the name of one that the server knows.

    Attributes:
        wav: the recording; relative to the workload's file.
        transcript: what is said in it.
        name: of a voice in the server's registry, instead of a recording.
        new: every request brings a variant of the recording that the server has not heard.
    """

    wav: str = ""
    transcript: str = ""
    name: str = ""
    new: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of request.

    Attributes:
        weight: how often, in relation to the others.
        protocol: one of `PROTOCOLS`.
        texts: names of lists of texts; one text of them all is chosen at random.
        voices: names of voices; one is chosen at random.
        options: keyword arguments of the client's call. Without a seed, each request has its own.
        cancel_share: share of the requests whose listener leaves after a few chunks (streams only).
        bad_share: share of the requests that the server has to refuse.
    """

    texts: tuple[str, ...]
    voices: tuple[str, ...]
    weight: float = 1.0
    protocol: str = "grpc-stream"
    options: dict[str, Any] = field(default_factory=dict)
    cancel_share: float = 0.0
    bad_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Scenarios with what they need.

    Attributes:
        path: of the file; recordings lie relative to it.
        texts, voices, scenarios: by name.
    """

    path: Path
    texts: dict[str, tuple[str, ...]]
    voices: dict[str, Speaker]
    scenarios: dict[str, Scenario]

    def asks(self, seed: int, user: int) -> _Asks:
        """The requests of one user: the same seed and number give the same ones."""
        return _Asks(self, np.random.default_rng((seed, user)))

    def voice(self, ask: Ask) -> Voice | str:
        """The voice of a request, as the client takes it."""
        speaker = self.voices[ask.voice]
        if speaker.name:
            return speaker.name
        recorded = recording(self.path.parent / speaker.wav, speaker.transcript)
        return _altered(recorded, ask.alteration) if ask.alteration else recorded

    def known_voices(self) -> list[Voice]:
        """The recordings that come again and again."""
        return [
            recording(self.path.parent / speaker.wav, speaker.transcript)
            for speaker in self.voices.values()
            if speaker.wav and not speaker.new
        ]

    def protocols(self) -> set[str]:
        """What the scenarios speak."""
        return {scenario.protocol for scenario in self.scenarios.values()}

    def with_shares(self, cancel: float | None = None, bad: float | None = None) -> Workload:
        """The same with other shares of listeners who leave (of streams) and of bad requests."""

        def changed(scenario: Scenario) -> Scenario:
            leaving = scenario.cancel_share if cancel is None else cancel
            wrong = scenario.bad_share if bad is None else bad
            return replace(
                scenario, cancel_share=leaving if scenario.protocol in STREAMS else 0.0, bad_share=wrong
            )

        for name, share in (("cancel share", cancel), ("bad share", bad)):
            check_share(share or 0.0, name)
        return replace(self, scenarios={name: changed(one) for name, one in self.scenarios.items()})


class _Asks:
    """An endless iterator of requests."""

    def __init__(self, workload: Workload, rng: np.random.Generator) -> None:
        self._workload, self._rng = workload, rng
        weights = np.array([scenario.weight for scenario in workload.scenarios.values()])
        self._edges = np.cumsum(weights / weights.sum())

    def __iter__(self) -> _Asks:
        return self

    def __next__(self) -> Ask:
        # Always the same number of draws: another share or text leaves the other choices as they are.
        which, text, voice, leaves, chunk, wrong, kind = self._rng.random(7)
        seed, alteration = (int(number) for number in self._rng.integers(1, _NUMBERS, 2))
        name = list(self._workload.scenarios)[int(np.searchsorted(self._edges[:-1], which, side="right"))]
        scenario = self._workload.scenarios[name]
        speaker = _at(scenario.voices, voice)
        bad = _at(tuple(BAD_INPUTS), kind) if wrong < scenario.bad_share else ""
        return Ask(
            name,
            scenario.protocol,
            _at([text for key in scenario.texts for text in self._workload.texts[key]], text),
            speaker,
            alteration if self._workload.voices[speaker].new else 0,
            {"seed": seed} | scenario.options | BAD_INPUTS.get(bad, {}),
            1 + int(chunk * _LAST_CHUNK) if leaves < scenario.cancel_share and not bad else 0,
            bad,
        )


def _at(items: Sequence[str], fraction: float) -> str:
    return items[int(fraction * len(items))]


@lru_cache
def recording(path: Path, transcript: str) -> Voice:
    """A recording, read once; ClientError when it is no voice."""
    return Voice.from_wav(path, transcript)


def _altered(voice: Voice, number: int) -> Voice:
    """A variant with other samples, by noise that nobody hears."""
    noise = np.random.default_rng(number).standard_normal(len(voice.audio), np.float32)
    return Voice(voice.audio + np.float32(_NOISE) * noise, voice.sample_rate, voice.transcript)


def check_share(share: object, what: str) -> None:
    """LoadTestError unless it is a share of a whole."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise LoadTestError(f"{what} = {share!r}: allowed are 0 to 1.")
