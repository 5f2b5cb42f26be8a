"""Figures of a run, from raw samples. Percentiles interpolate linearly between ranks, as numpy does.

Waits are counted from the intended time, so that in an open loop a late request is not excused. A request
belongs to the stage and to the warm-up in which it was intended; audio and answers are counted when they
came, so that what an overloaded server delivers later is no throughput of the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from cosytriton_loadtests import playback
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.samples import Sample

ALL = "all"  # scenario, stage or protocol of a row over several of them
REFUSED = "InvalidInputError"  # what a bad request has to get
C100_SECONDS = 0.1

Measure = Callable[[Sample], float | None]


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution; seconds, or a ratio."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of raw values; None: there are none."""
        array = np.fromiter(values, float)
        if not array.size:
            return None
        p50, p90, p95, p99 = map(float, np.percentile(array, [50, 90, 95, 99]))
        return cls(array.size, float(array.mean()), p50, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Promise:
    """What makes a request count for the goodput; None: not limited. Failed ones and leavers never count.

    Attributes:
        first_audio, first_audible, whole: seconds.
        rtf: seconds of work for a second of audio.
        underrun: the longest one allowed, in seconds.
    """

    first_audio: float | None = None
    first_audible: float | None = None
    whole: float | None = None
    rtf: float | None = None
    underrun: float | None = C100_SECONDS

    def met(self, sample: Sample) -> bool:
        """Whether the request was served as promised."""
        if not heard(sample):
            return False
        limits = (
            (self.first_audio, first_audio),
            (self.first_audible, playback.first_audible),
            (self.whole, whole),
            (self.rtf, rtf),
            (self.underrun, playback.worst_underrun),
        )
        values = ((limit, measure(sample)) for limit, measure in limits if limit is not None)
        return all(value is not None and value <= limit for limit, value in values)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a scenario in a stage over a protocol, any of them `ALL`.

    Attributes:
        seconds: length of the window.
        requests: those that were intended in it.
        heard, left, refused, failed: each is one of these: spoken to the end; the listener left on purpose;
            a bad request that was refused, as it has to be; everything else.
        error_kinds: how many failed of each kind.
        first_audio: until the first chunk; those of leavers too.
        first_audible: until something can be heard.
        whole: until the last chunk.
        rtf: time from sending to the last chunk, for a second of audio.
        gap: between two chunks.
        worst_underrun: the longest of each request.
        c100: share of the heard and left ones without an underrun above 100 ms; None: nothing was heard.
        answers_rate: answers that were complete, in a second.
        audio_rate: seconds of audio that came in a second.
        goodput: requests in a second that were served as promised.
    """

    scenario: str
    stage: str
    protocol: str
    seconds: float
    requests: int
    heard: int
    left: int
    refused: int
    failed: int
    first_audio: Spread | None
    first_audible: Spread | None
    whole: Spread | None
    rtf: Spread | None
    gap: Spread | None
    worst_underrun: Spread | None
    c100: float | None
    answers_rate: float
    audio_rate: float
    goodput: float
    error_kinds: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Scenario, stage and protocol in words."""
        return " / ".join(part for part in (self.scenario, self.stage, self.protocol) if part != ALL) or ALL

    @property
    def errors(self) -> float:
        """Share of the requests that failed."""
        return self.failed / self.requests if self.requests else 0.0

    def value(self, measure: str) -> float | None:
        """A figure by its name, such as "first_audio_p95", "rtf_max", "c100"; None: not measured.

        Raises:
            LoadTestError: there is no such figure.
        """
        name, _, percentile = measure.rpartition("_")
        spread = getattr(self, name, None) if name in _SPREADS else None
        if name in _SPREADS and percentile in Spread.__slots__:
            return None if spread is None else float(getattr(spread, percentile))
        if measure not in _NUMBERS:
            raise LoadTestError(
                f"there is no measure {measure!r}; there are {', '.join(_NUMBERS)} and "
                f"{', '.join(_SPREADS)} with _{', _'.join(Spread.__slots__)}."
            )
        number = getattr(self, measure)
        return None if number is None else float(number)


_SPREADS = ("first_audio", "first_audible", "whole", "rtf", "gap", "worst_underrun")
_NUMBERS = (
    *("requests", "heard", "left", "refused", "failed", "errors"),
    *("c100", "answers_rate", "audio_rate", "goodput"),
)


def refused(sample: Sample) -> bool:
    """Whether a bad request got the refusal that it has to get."""
    return bool(sample.request.get("bad")) and sample.error == REFUSED


def failed(sample: Sample) -> bool:
    """Whether it is an error: a bad request that was refused is none."""
    return bool(sample.error) and not refused(sample)


def heard(sample: Sample) -> bool:
    """Whether it was spoken to its end."""
    return not sample.error and not sample.cancelled


def first_audio(sample: Sample) -> float | None:
    """Seconds from the intended time until the first chunk."""
    return sample.first_audio


def whole(sample: Sample) -> float | None:
    """Seconds from the intended time until the last chunk of a whole answer."""
    return sample.chunks[-1].at - sample.intended if heard(sample) and sample.chunks else None


def rtf(sample: Sample) -> float | None:
    """Real-time factor of a whole answer: below 1 is faster than it sounds."""
    seconds = sample.audio_seconds
    return (sample.chunks[-1].at - sample.sent) / seconds if heard(sample) and seconds else None


def summary_of(
    samples: Iterable[Sample], begin: float, end: float, promise: Promise | None = None
) -> Summary:
    """Figures over everything in a window.

    Args:
        samples: of the whole run, so that answers which came in the window are complete.
        begin: of the window, in seconds since the epoch.
        end: of the window.
        promise: what counts for the goodput.
    """
    return _summary((ALL, ALL, ALL), list(samples), (begin, end), promise or Promise())


def summarise(
    samples: Iterable[Sample], info: RunInfo | None = None, promise: Promise | None = None
) -> list[Summary]:
    """Figures over everything, for each stage, and for each scenario x stage x protocol, in this order.

    Args:
        samples: all of the run; the warm-up is cut here, where `info` is given.
        info: of the run, for the windows; None: from the first intended time to the last end.
        promise: what counts for the goodput.

    Raises:
        LoadTestError: no request was intended behind the warm-up.
    """
    given, promise = list(samples), promise or Promise()
    windows = _windows(given, info)
    begin, end = min(w[0] for w in windows.values()), max(w[1] for w in windows.values())
    if not any(begin <= sample.intended < end for sample in given):
        raise LoadTestError(
            f"none of {len(given)} requests was intended behind the warm-up: let the run be longer."
        )
    rows = [_summary((ALL, ALL, ALL), given, (begin, end), promise)]
    rows += [_summary((ALL, stage, ALL), given, window, promise) for stage, window in windows.items()]
    for stage, window in windows.items():
        kinds = {(s.scenario, s.protocol) for s in given if window[0] <= s.intended < window[1]}
        for scenario, protocol in sorted(kinds):
            some = [s for s in given if (s.scenario, s.protocol) == (scenario, protocol)]
            rows.append(_summary((scenario, stage, protocol), some, window, promise))
    return rows


def of_run(folder: RunFolder, promise: Promise | None = None) -> list[Summary]:
    """`summarise` of a run's folder."""
    return summarise(folder.samples(warm=False), folder.info(), promise)


def _windows(samples: Sequence[Sample], info: RunInfo | None) -> dict[str, tuple[float, float]]:
    """Begin and end of each stage, without the warm-up; a stage within the warm-up has none."""
    if info is None or not info.stages:
        ends = [sample.ended for sample in samples] or [0.0]
        last = np.nextafter(max(ends), np.inf)  # a window is open at its end
        return {ALL: (min((sample.intended for sample in samples), default=0.0), float(last))}
    warm = info.stages[0].start + info.warm_up
    windows = {stage.name: (max(stage.start, warm), stage.start + stage.seconds) for stage in info.stages}
    kept = {name: window for name, window in windows.items() if window[0] < window[1]}
    if not kept:
        raise LoadTestError(f"a warm-up of {info.warm_up:g} s takes all of the run: let it run for longer.")
    return kept


def _summary(
    place: tuple[str, str, str], samples: Sequence[Sample], window: tuple[float, float], promise: Promise
) -> Summary:
    begin, end = window
    seconds = end - begin
    intended = [sample for sample in samples if begin <= sample.intended < end]
    audio = [sample for sample in intended if sample.chunks]
    spread = partial(_spread, intended)
    smooth = [playback.worst_underrun(sample) <= C100_SECONDS for sample in audio]
    came = chain.from_iterable(sample.chunks for sample in samples)
    complete = sum(begin <= sample.ended < end for sample in samples if heard(sample))
    return Summary(
        *place,
        seconds=seconds,
        requests=len(intended),
        heard=sum(map(heard, intended)),
        left=sum(sample.cancelled and not sample.error for sample in intended),
        refused=sum(map(refused, intended)),
        failed=sum(map(failed, intended)),
        error_kinds=dict(Counter(sample.error for sample in intended if failed(sample)).most_common()),
        first_audio=spread(first_audio),
        first_audible=spread(playback.first_audible),
        whole=spread(whole),
        rtf=spread(rtf),
        gap=Spread.of(chain.from_iterable(map(playback.gaps, intended))),
        worst_underrun=Spread.of(map(playback.worst_underrun, audio)),
        c100=sum(smooth) / len(smooth) if smooth else None,
        answers_rate=complete / seconds,
        audio_rate=sum(chunk.seconds for chunk in came if begin <= chunk.at < end) / seconds,
        goodput=sum(map(promise.met, intended)) / seconds,
    )


def _spread(samples: Iterable[Sample], measure: Measure) -> Spread | None:
    return Spread.of(value for value in map(measure, samples) if value is not None)
