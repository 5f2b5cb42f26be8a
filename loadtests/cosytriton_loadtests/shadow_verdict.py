"""The verdict of a shadow evaluation: figures of paired answers, their limits, and the text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosytriton_client import Voice
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.judges import Judges, edits
from cosytriton_loadtests.waveforms import Samples, Values, mel_distance, snr
from cosytriton_loadtests.workload import Ask

RESAMPLES = 2000
FEW = 8  # inputs below which an interval says little


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a server said to one input.

    Attributes:
        samples: float32 [n].
        rate: Hz.
        tokens: speech tokens.
        first_audio: seconds until the first chunk.
        whole: seconds until the last one.
        error: why there is no answer; "".
        ids: the speech tokens of the first piece of the text, where the server lets its stages be asked.
    """

    samples: Samples
    rate: int = 0
    tokens: int = 0
    first_audio: float = 0.0
    whole: float = 0.0
    error: str = ""
    ids: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Duration of the audio."""
        return self.samples.size / self.rate


@dataclass(frozen=True, slots=True)
class Case:
    """One input: the present server's answer, its answer under another seed, and the candidate's."""

    ask: Ask
    present: Answer
    reseeded: Answer
    candidate: Answer
    voice: Voice | str = ""


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """What a candidate may be worse by.

    How it sounds depends on draws, so a change counts where it is beyond them. Times must be shown to be
    kept: where the interval is too wide for that, more inputs are needed.

    Attributes:
        failures: inputs that the present server speaks and the candidate does not.
        mel_excess: distance to the present server, in relation to its own under another seed.
        duration: change of the duration either way, as a share.
        latency: upper end of the interval of a ratio of times.
        word_errors: more words that are misheard, as a share of all.
        similarity: loss of likeness to the reference, a cosine.
    """

    failures: int = 0
    mel_excess: float = 1.25
    duration: float = 0.15
    latency: float = 1.1
    word_errors: float = 0.03
    similarity: float = 0.02


@dataclass(frozen=True, slots=True)
class Figure:
    """A median over the inputs, or a mean of shares, with its interval.

    Attributes:
        name: of what was measured.
        value: of the inputs given.
        low: lower end of the interval.
        high: upper end.
        limit: what is allowed, in words; "": the figure only informs.
        kept: whether it is.
        spec: how it is formatted.
    """

    name: str
    value: float
    low: float
    high: float
    limit: str = ""
    kept: bool = True
    spec: str = ".2f"

    def missed(self) -> str:
        """That the limit is not kept."""
        interval = f"{self.low:{self.spec}} to {self.high:{self.spec}}"
        return f"{self.name} is {self.value:{self.spec}} ({interval}), allowed is {self.limit}"

    def row(self) -> str:
        """As a row of the Markdown table."""
        value, low, high = (f"{number:{self.spec}}" for number in (self.value, self.low, self.high))
        judged = ("yes" if self.kept else "**no**") if self.limit else ""
        return f"| {self.name} | {value} | {low} to {high} | {self.limit} | {judged} |"

    def within(self, limit: str, kept: bool) -> Figure:
        """The same with a limit."""
        return replace(self, limit=limit, kept=kept)

    def beyond_noise(self, limit: str, kept: bool) -> Figure:
        """The same with a limit for a ratio; it is missed only where the interval excludes 1."""
        return self.within(f"{limit}, or 1 in the interval", kept or self.low <= 1 <= self.high)


@dataclass(frozen=True, slots=True)
class ShadowVerdict:
    """Whether the candidate is promoted.

    Attributes:
        names: of the present server and of the candidate.
        count: inputs that both answered.
        figures: everything that was measured.
        failures: what the candidate said instead of speaking, by input.
    """

    names: tuple[str, str]
    count: int
    figures: tuple[Figure, ...]
    failures: tuple[str, ...] = ()

    @property
    def promote(self) -> bool:
        """Whether every limit is kept."""
        return all(figure.kept for figure in self.figures)

    @property
    def exit_code(self) -> int:
        """0: promote, 1: do not."""
        return 0 if self.promote else 1

    @property
    def reason(self) -> str:
        """One line."""
        missed = [figure.missed() for figure in self.figures if not figure.kept]
        verdict = "; ".join(missed) or f"all limits are kept on {self.count} inputs"
        return f"{'promote' if self.promote else 'do not promote'} {self.names[1]}: {verdict}"

    def markdown(self) -> str:
        """The verdict and its figures."""
        present, candidate = self.names
        lines = [
            f"# {'Promote' if self.promote else 'Do not promote'} {candidate}",
            "",
            f"{self.reason[0].upper()}{self.reason[1:]}.",
            "",
            f"{self.count} inputs, {candidate} beside {present}. Intervals: 95 % of a bootstrap.",
            *([f"So few say little: give {FEW} or more."] if self.count < FEW else []),
            "",
            "| figure | value | interval | allowed | kept |",
            "|---|---|---|---|---|",
            *(figure.row() for figure in self.figures),
            *(
                ["", "What failed:", "", *(f"- {failure}" for failure in self.failures)]
                if self.failures
                else []
            ),
        ]
        return "\n".join(lines) + "\n"


def judge(
    names: tuple[str, str], cases: Sequence[Case], limits: ShadowLimits, judges: Judges | None = None
) -> ShadowVerdict:
    """Measure the answers and compare with the limits.

    Raises:
        LoadTestError: the present server answers nothing, so there is nothing to compare with.
    """
    good = [case for case in cases if not (case.present.error or case.reseeded.error)]
    if not good:
        errors = {case.present.error or case.reseeded.error for case in cases}
        raise LoadTestError(
            f"{names[0]} answers none of {len(cases)} inputs ({'; '.join(sorted(errors))}): there is nothing "
            "to compare with."
        )
    failures = tuple(f"{case.ask.text!r}: {case.candidate.error}" for case in good if case.candidate.error)
    spoken, count = [case for case in good if not case.candidate.error], float(len(failures))
    failed = Figure("failed inputs", count, count, count, spec=".0f")
    figures = [failed.within(f"at most {limits.failures}", count <= limits.failures)]
    if spoken:
        figures += [*_heard(spoken, limits), *_tokens(spoken), *_times(spoken, limits)]
        figures += _judged(spoken, limits, judges) if judges else ()
    return ShadowVerdict(names, len(spoken), tuple(figures), failures)


def _heard(cases: Sequence[Case], limits: ShadowLimits) -> Iterator[Figure]:
    """How far the recordings are apart."""
    apart = np.array([_distance(case.present, case.candidate) for case in cases])
    floor = np.array([_distance(case.present, case.reseeded) for case in cases])
    yield figure("log-mel distance, dB", apart)
    yield figure("to another seed, dB", floor)
    pairs = np.stack([apart, np.maximum(floor, 1e-9)], axis=1)
    excess = figure("log-mel distance over that to another seed", pairs, _ratio_of_medians)
    yield excess.beyond_noise(f"at most {limits.mel_excess:g}", excess.value <= limits.mel_excess)
    ratio = figure("duration ratio", [case.candidate.seconds / case.present.seconds for case in cases])
    most = 1 + limits.duration
    yield ratio.beyond_noise(f"{1 / most:.2f} to {most:.2f}", 1 / most <= ratio.value <= most)
    equal = [case for case in cases if case.candidate.samples.size == case.present.samples.size]
    if equal:
        yield figure(
            "SNR where lengths are equal, dB", [_snr(case.present, case.candidate) for case in equal]
        )


def _tokens(cases: Sequence[Case]) -> Iterator[Figure]:
    """How far the speech tokens agree; sampling makes that little for any other logits, so it informs."""
    for title, of in (("", _candidate), (" to another seed", _reseeded)):
        counts = [of(case).tokens == case.present.tokens for case in cases]
        yield figure(f"equal token counts{title}, share", counts, _means)
        both = [case for case in cases if case.present.ids and of(case).ids]
        if both:
            yield figure(
                f"equal token ids{title}, share", [_agreement(case.present, of(case)) for case in both]
            )


def _times(cases: Sequence[Case], limits: ShadowLimits) -> Iterator[Figure]:
    """How much longer the candidate takes: for the first audio, and for a second of speech."""
    first = [case.candidate.first_audio / case.present.first_audio for case in cases]
    whole = [_rtf(case.candidate) / _rtf(case.present) for case in cases]
    for name, ratios in (("first audio, ratio", first), ("time for a second of speech, ratio", whole)):
        ratio = figure(name, ratios)
        yield ratio.within(f"interval below {limits.latency:g}", ratio.high <= limits.latency)


def _judged(cases: Sequence[Case], limits: ShadowLimits, judges: Judges) -> Iterator[Figure]:
    """What listeners say; means, because most single inputs have no error at all."""
    english = [case for case in cases if case.ask.text.isascii()]
    if english:
        errors = [
            [judges.word_errors(answer.samples, answer.rate, case.ask.text) for answer in _both(case)]
            for case in english
        ]
        yield figure("words misheard of the present one, share", [present for present, _ in errors], _means)
        more = figure("more words misheard, share", [new - old for old, new in errors], _means)
        yield more.within(f"at most {limits.word_errors:g}", more.value <= limits.word_errors)
    known = [(case, case.voice) for case in cases if isinstance(case.voice, Voice)]
    if known:
        alike = [
            [
                judges.similarity(answer.samples, voice.audio, (answer.rate, voice.sample_rate))
                for answer in _both(case)
            ]
            for case, voice in known
        ]
        yield figure("likeness of the present one to the reference", [old for old, _ in alike], _means)
        loss = figure("loss of likeness", [old - new for old, new in alike], _means, ".3f")
        yield loss.within(f"at most {limits.similarity:g}", loss.value <= limits.similarity)


Statistic = Callable[[Values], Values]
"""Resamples [resamples, inputs, ...] to one number for each."""


def _medians(rows: Values) -> Values:
    return np.asarray(np.median(rows, axis=1))


def _means(rows: Values) -> Values:
    return np.asarray(rows.mean(axis=1))


def _ratio_of_medians(rows: Values) -> Values:
    medians = np.median(rows, axis=1)
    return np.asarray(medians[:, 0] / medians[:, 1])


def figure(
    name: str, values: Sequence[float] | Values, statistic: Statistic = _medians, spec: str = ".2f"
) -> Figure:
    """A statistic of values [inputs, ...] with its percentile bootstrap interval of 95 %."""
    given = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, len(given), (RESAMPLES, len(given)))
    low, high = np.percentile(statistic(given[picks]), [2.5, 97.5])
    return Figure(name, float(statistic(given[None])[0]), float(low), float(high), spec=spec)


def _candidate(case: Case) -> Answer:
    return case.candidate


def _reseeded(case: Case) -> Answer:
    return case.reseeded


def _both(case: Case) -> tuple[Answer, Answer]:
    return case.present, case.candidate


def _rtf(answer: Answer) -> float:
    return answer.whole / answer.seconds


def _distance(one: Answer, other: Answer) -> float:
    return mel_distance(one.samples, other.samples, one.rate)


def _snr(one: Answer, other: Answer) -> float:
    return snr(one.samples, other.samples, one.rate)


def _agreement(one: Answer, other: Answer) -> float:
    """Share of the tokens that need no edit; 1: equal."""
    return 1 - edits(one.ids, other.ids) / max(len(one.ids), len(other.ids))
