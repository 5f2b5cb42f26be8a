"""Shadow evaluation: a candidate answers what the present server answers, and is promoted or not.

Both get the same texts, voices and seeds. Where a candidate computes other logits (INT8), sampling soon draws
another token, and from there on both say the text in another way. So recordings are not compared sample by
sample but with a floor: how far the present server is from itself under another seed. Figures are medians
over the inputs; intervals are the 95 % of a percentile bootstrap (Efron and Tibshirani, 1993).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from cosytriton_client import Client, ClientError, Options, Voice
from cosytriton_ensemble.serving import serving
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.judges import Judges
from cosytriton_loadtests.shadow_verdict import Answer, Case, ShadowLimits, ShadowVerdict, judge
from cosytriton_loadtests.speech_tokens import SpeechTokens
from cosytriton_loadtests.workload import Ask, Workload

COUNT = 12  # inputs
_NOTHING = np.zeros(0, np.float32)

log = logging.getLogger(__name__)

Speak = Callable[[Ask], Answer]


def evaluate(
    a_url: str,
    b_url: str,
    workload: Workload,
    count: int = COUNT,
    *,
    seed: int = 0,
    limits: ShadowLimits | None = None,
    judges: Judges | None = None,
) -> ShadowVerdict:
    """Compare the candidate `b_url` with the present server `a_url`, in turn on each input.

    Args:
        a_url: `host:port` of gRPC of the present server.
        b_url: that of the candidate.
        workload: what is asked for; every input is streamed, whatever its scenario's protocol.
        count: inputs.
        seed: the same one gives the same inputs.
        limits: of the verdict.
        judges: listen to the recordings too.

    Raises:
        LoadTestError: there is nothing to compare, because the present server fails or the count is wrong.
    """
    asks = inputs(workload, count, seed)
    cases = []
    with Client(a_url) as a, Client(b_url) as b:
        present, candidate = _speaking(a, a_url, workload), _speaking(b, b_url, workload)
        for speak in (present, candidate):
            speak(asks[0])  # the first call of a server is slower
        for number, ask in enumerate(asks):
            turns = (present, candidate) if number % 2 else (candidate, present)  # a slow spell hits both
            answers = {speak: speak(ask) for speak in turns}
            again = present(_reseeded(ask))
            cases.append(Case(ask, answers[present], again, answers[candidate], workload.voice(ask)))
    return judge((a_url, b_url), cases, limits or ShadowLimits(), judges)


def evaluate_profiles(
    repository: Path,
    profiles: tuple[str, str],
    workload: Workload,
    folder: Path,
    count: int = COUNT,
    *,
    seed: int = 0,
    limits: ShadowLimits | None = None,
    judges: Judges | None = None,
) -> ShadowVerdict:
    """Compare two profiles of one repository, which are served here one after the other.

    Args:
        repository: with the artifacts of both.
        profiles: the present one and the candidate.
        workload: what is asked for.
        folder: for the logs of the servers.
        count: inputs.
        seed: the same one gives the same inputs.
        limits: of the verdict.
        judges: listen to the recordings too.

    Raises:
        ServerError: a server does not start.
        LoadTestError: as `evaluate` does.
    """
    asks = inputs(workload, count, seed)
    folder.mkdir(parents=True, exist_ok=True)
    present, candidate = profiles
    with _served(repository, present, folder, workload, asks) as speak:
        old = [(speak(ask), speak(_reseeded(ask))) for ask in asks]
    with _served(repository, candidate, folder, workload, asks) as speak:
        new = [speak(ask) for ask in asks]
    cases = [
        Case(ask, *answers, other, workload.voice(ask))
        for ask, answers, other in zip(asks, old, new, strict=True)
    ]
    return judge(profiles, cases, limits or ShadowLimits(), judges)


def inputs(workload: Workload, count: int, seed: int = 0) -> list[Ask]:
    """The requests of a load test that are to be spoken to their end.

    Raises:
        LoadTestError: the count is not allowed.
    """
    if count < 1:
        raise LoadTestError(f"count = {count}: allowed is 1 or more.")
    return list(islice(workload.with_shares(0, 0).asks(seed, 0), count))


@contextmanager
def _served(
    repository: Path, profile: str, folder: Path, workload: Workload, asks: Sequence[Ask]
) -> Iterator[Speak]:
    """A server of the profile that has spoken once."""
    options = (f"--profile={profile}", "--exit-timeout=2")
    with (
        serving(repository, folder / f"{profile}.log", *options) as server,
        Client(server.grpc_url) as client,
    ):
        speak = _speaking(client, server.grpc_url, workload)
        speak(asks[0])
        yield speak


def _speaking(client: Client, url: str, workload: Workload) -> Speak:
    def speak(ask: Ask) -> Answer:
        try:
            return _answer(client, url, ask, workload)
        except ClientError as error:
            return Answer(_NOTHING, error=f"{type(error).__name__}: {error}")

    return speak


def _answer(client: Client, url: str, ask: Ask, workload: Workload) -> Answer:
    voice = workload.voice(ask)
    if not isinstance(voice, str):
        client.encode(voice)  # no part of the times
    begin, first, chunks = time.perf_counter(), 0.0, []
    with closing(client.stream(ask.text, voice, **cast(Options, ask.options))) as stream:
        for chunk in stream:
            first = first or time.perf_counter() - begin
            chunks.append(chunk)
    whole, tokens = time.perf_counter() - begin, sum(chunk.token_count for chunk in chunks)
    samples = np.concatenate([chunk.samples for chunk in chunks])
    return Answer(samples, chunks[0].sample_rate, tokens, first, whole, ids=_ids(client, url, ask, voice))


def _ids(client: Client, url: str, ask: Ask, voice: Voice | str) -> tuple[int, ...]:
    """The speech tokens, where they can be had."""
    if isinstance(voice, str):
        return ()
    try:
        with SpeechTokens(url) as tokens:
            return tokens.of(ask, voice, client.encode(voice))
    except LoadTestError as error:
        log.debug("%s: %s", url, error)
        return ()


def _reseeded(ask: Ask) -> Ask:
    return replace(ask, options=ask.options | {"seed": int(ask.options["seed"]) + 1})
