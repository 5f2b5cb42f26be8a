"""Quality under load: requests of a run are made again, alone, and have to get the same answer.

A server mixes up its listeners only while it has several. So the run notes what each request got, and after
it, when nobody else is served, a share of them is asked for again. Batches of other shapes sum in another
order, so samples may differ by a rounding; another voice, a lost chunk or other speech tokens may not be.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from cosytriton_client import Audio, Client, ClientError, Options
from cosytriton_loadtests import answers
from cosytriton_loadtests.addresses import Addresses
from cosytriton_loadtests.answers import Answers, lot
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run_folder import RunFolder
from cosytriton_loadtests.samples import Sample
from cosytriton_loadtests.statistics import heard
from cosytriton_loadtests.waveforms import Samples, mel_distance
from cosytriton_loadtests.workload import Ask, Workload, check_share
from cosytriton_loadtests.workload_file import read_workload

TOLERANCE = 1e-3  # of full scale; another voice differs by a hundred times as much
NEARER = 0.5  # of the distance to its own answer: whose answer is as near as that, was mixed up with it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose answer under load was not the one that it gets alone.

    Attributes:
        ask: the request.
        what: how the two differ.
        own: distance in dB to its own answer alone; None: its audio was not kept.
        others: the same to the answers that the other voices of the workload give to its text.
        mixed: the voice, or the other request, whose answer it got; "": neither.
    """

    ask: Ask
    what: str
    own: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    mixed: str = ""

    def __str__(self) -> str:
        """One line for people."""
        request = f"{self.ask.scenario}, voice {self.ask.voice!r}, seed {self.ask.options.get('seed')}, "
        verdict = (
            f"a mixed voice, it got the answer of {self.mixed}"
            if self.mixed
            else "it is not what it gets alone"
        )
        distances = [f"{decibels:.1f} dB from {name}" for name, decibels in self.others]
        if self.own is not None:
            distances.insert(0, f"{self.own:.1f} dB from its own answer alone")
        far = f" ({', '.join(distances)})" if distances else ""
        return f"{request}{self.ask.text[:40]!r}: {verdict}; {self.what}{far}."


def check(
    folder: RunFolder, url: str, share: float = answers.SHARE, *, tolerance: float = TOLERANCE
) -> list[Difference]:
    """Make a share of the run's requests again, one after the other, and compare the answers.

    Args:
        folder: of the run.
        url: `host:port` of gRPC of the server, which nobody else asks meanwhile.
        share: of the requests that were spoken to their end; one of them at least.
        tolerance: largest difference of two samples, of full scale.

    Returns:
        The requests that got something else under load.

    Raises:
        LoadTestError: nothing was spoken in the run, or the server does not answer now.
    """
    check_share(share, "share")
    every = [sample for sample in folder.samples(warm=False) if heard(sample) and sample.chunks]
    if not every:
        raise LoadTestError(f"{folder.path}: no request was spoken to its end, so that none can be repeated.")
    drawn = [sample for sample in every if lot(sample.request) < share] or [
        min(every, key=lambda sample: lot(sample.request))
    ]
    info = folder.info()
    addresses = Addresses(url, str(info.options.get("http_url") or ""))
    with _Checker(
        folder.path, read_workload(Path(info.options["workload"])), addresses, tolerance
    ) as checker:
        found = [difference for sample in drawn if (difference := checker.check(sample, every))]
    log.info("%d of %d answers were asked for again: %d differ", len(drawn), len(every), len(found))
    return found


class _Checker:
    """Asks again and compares; a context manager that closes its connections."""

    def __init__(self, path: Path, workload: Workload, addresses: Addresses, tolerance: float) -> None:
        self._workload, self._addresses, self._tolerance = workload, addresses, tolerance
        self._kept = Answers(path / answers.FOLDER)
        self._clients: dict[str, Client] = {}
        self._closing = ExitStack()

    def __enter__(self) -> _Checker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def check(self, sample: Sample, every: Iterable[Sample]) -> Difference | None:
        """None: the answer is the one that the request gets alone."""
        ask = Ask(**sample.request)
        alone, kept = self._ask(ask), self._kept.get(sample)
        what = self._differs(sample, kept, alone)
        if not what:
            return None
        copies = [
            _named(one) for one in every if one.digest == sample.digest and one.request != sample.request
        ]
        others = {f"voice {other.voice!r}": self._ask(other) for other in self._in_other_voices(ask)}
        copies += [name for name, audio in others.items() if _digest(audio) == sample.digest]
        if kept is None:
            return Difference(ask, what, mixed="".join(copies[:1]))
        own = _distance(kept, alone)
        far = {name: _distance(kept, audio) for name, audio in others.items()}
        copies += [name for name in sorted(far, key=far.__getitem__) if far[name] < NEARER * own]
        return Difference(ask, what, own, tuple(far.items()), "".join(copies[:1]))

    def _differs(self, sample: Sample, kept: Samples | None, alone: Audio) -> str:
        """How an answer differs from that alone; "": it does not."""
        if sample.tokens != alone.token_count:
            return f"{sample.tokens} speech tokens under load, {alone.token_count} alone"
        if sample.digest == _digest(alone):
            return ""
        if abs(sample.audio_seconds - alone.seconds) > 0.5 / alone.sample_rate:
            return f"{sample.audio_seconds:.3f} s of audio under load, {alone.seconds:.3f} s alone"
        if kept is None:
            log.warning("%s: the samples are not quite those alone, and were not kept", _named(sample))
            return ""
        apart = np.abs(kept - alone.samples)
        if apart.max() <= self._tolerance:
            return ""
        first, last = np.flatnonzero(apart > self._tolerance)[[0, -1]] / alone.sample_rate
        return f"samples differ by up to {apart.max():.2g} of full scale, from {first:.2f} to {last:.2f} s"

    def _in_other_voices(self, ask: Ask) -> list[Ask]:
        return [replace(ask, voice=name, alteration=0) for name in self._workload.voices if name != ask.voice]

    def _ask(self, ask: Ask) -> Audio:
        """The answer of a request that is served alone."""
        client, voice = self._client(ask.protocol), self._workload.voice(ask)
        options = cast(Options, ask.options)
        try:
            if not ask.streams:
                return client.synthesize(ask.text, voice, **options)
            with closing(client.stream(ask.text, voice, **options)) as stream:
                chunks = list(stream)
        except ClientError as error:
            raise LoadTestError(f"a request of the run cannot be made again, alone: {error}") from error
        samples = np.concatenate([chunk.samples for chunk in chunks])
        return Audio(samples, sum(chunk.token_count for chunk in chunks), chunks[0].sample_rate)

    def _client(self, protocol: str) -> Client:
        if protocol not in self._clients:
            self._clients[protocol] = self._closing.enter_context(Client(self._addresses.of(protocol)))
        return self._clients[protocol]


def _distance(heard_samples: Samples, audio: Audio) -> float:
    return mel_distance(heard_samples, audio.samples, audio.sample_rate)


def _digest(audio: Audio) -> str:
    return hashlib.sha256(audio.samples.tobytes()).hexdigest()


def _named(sample: Sample) -> str:
    request = sample.request
    return f"{sample.scenario}, voice {request['voice']!r}, {request['text'][:40]!r}"
