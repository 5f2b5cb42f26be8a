"""What an autoscaler makes of a spike in traffic: first audio and the price of it, for several policies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
import simpy

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.planner.cores import Process
from cosytriton_loadtests.planner.replica import Replica, Speech, Visit
from cosytriton_loadtests.planner.simulation import draw
from cosytriton_loadtests.planner.stage_times import StageTimes

TOLERANCE = 0.1  # of the metric's ratio to its target, within which nothing is changed
_LEAST_GROWTH = 4  # pods that may be added at a time where doubling would be less
_BIN = 30.0  # seconds of a moment of the timeline


@dataclass(frozen=True, slots=True)
class Policy:
    """A HorizontalPodAutoscaler, fed by Kubernetes or by KEDA.

    Attributes:
        metric: "requests" that are being spoken or wait, or "slots" of the language model that are taken.
        target: of the metric for each replica.
        minimum, maximum: replicas.
        poll: seconds between two looks at the metric.
        stabilization: seconds of which the highest recommendation counts before replicas are removed.
        start: seconds until a new pod is ready.
    """

    metric: Literal["requests", "slots"]
    target: float
    minimum: int = 1
    maximum: int = 10
    poll: float = 15.0
    stabilization: float = 300.0
    start: float = 60.0

    def __str__(self) -> str:
        return (
            f"{self.target:g} {self.metric}/replica, {self.minimum} to {self.maximum}, "
            f"{self.stabilization:g} s stabilization, pods ready after {self.start:g} s"
        )

    def wanted(self, metric: float, replicas: int) -> int:
        """How many replicas the autoscaler recommends while the metric's sum is `metric`.

        The algorithm of Kubernetes' documentation ("Horizontal Pod Autoscaling") for an average value, with
        its default limit of growth: double, or 4 more.
        """
        if abs(metric / (self.target * replicas) - 1) <= TOLERANCE:
            return replicas
        most = min(self.maximum, max(2 * replicas, replicas + _LEAST_GROWTH))
        return max(self.minimum, min(most, math.ceil(metric / self.target)))


@dataclass(frozen=True, slots=True)
class Surge:
    """Traffic that rises to a peak at once, stays, and falls back.

    Attributes:
        base, peak: requests a second.
        begin: seconds until the peak.
        length: its seconds.
        seconds: of the whole.
    """

    base: float
    peak: float
    begin: float = 300.0
    length: float = 600.0
    seconds: float = 1800.0

    def arrivals(self, rng: np.random.Generator) -> list[float]:
        """Arrivals of a Poisson process with these rates: given their number, they are uniform."""
        edges = (0.0, self.begin, self.begin + self.length, self.seconds)
        rates = (self.base, self.peak, self.base)
        parts = [
            rng.uniform(begin, end, rng.poisson(rate * (end - begin)))
            for rate, begin, end in zip(rates, edges, edges[1:], strict=False)
        ]
        return [float(at) for at in np.sort(np.concatenate(parts))]


@dataclass(frozen=True, slots=True)
class Moment:
    """A while of the timeline.

    Attributes:
        at: its begin in seconds.
        replicas: that were ready, on average.
        first_audio_p95: seconds, of the requests that came in it; None: none came.
    """

    at: float
    replicas: float
    first_audio_p95: float | None


@dataclass(frozen=True, slots=True)
class Scaled:
    """What a policy came to.

    Attributes:
        policy: which one.
        first_audio_p95: seconds, over all requests.
        late: share of requests whose first audio came later than allowed, or never.
        pod_minutes: that were paid for, pods that start or finish their last requests included.
        most: pods at one time.
        timeline: of the whole.
    """

    policy: Policy
    first_audio_p95: float
    late: float
    pod_minutes: float
    most: int
    timeline: tuple[Moment, ...]


def scale(
    times: StageTimes, mix: Sequence[Speech], surge: Surge, policy: Policy, allowed: float, seed: int = 0
) -> Scaled:
    """Simulate a policy; `allowed` is the limit of first audio in seconds. Equal seeds give equal requests.

    Raises:
        LoadTestError: the policy or the traffic makes no sense.
    """
    if not 0 <= surge.begin <= surge.begin + surge.length <= surge.seconds:
        raise LoadTestError(f"{surge}: the peak lies outside of the {surge.seconds:g} s.")
    if not (mix and 0 < policy.minimum <= policy.maximum and policy.target > 0 and policy.poll > 0):
        raise LoadTestError(
            f"{policy}, every {policy.poll:g} s: give positive numbers, and a mix of requests."
        )
    return _Cluster(times, policy, surge).run(mix, allowed, seed)


def mean_of(draws: Sequence[Scaled]) -> Scaled:
    """One policy over several draws of the requests: means, the median of p95, and the first timeline."""
    first, count = draws[0], len(draws)
    return Scaled(
        policy=first.policy,
        first_audio_p95=sorted(draw.first_audio_p95 for draw in draws)[count // 2],
        late=sum(draw.late for draw in draws) / count,
        pod_minutes=sum(draw.pod_minutes for draw in draws) / count,
        most=max(draw.most for draw in draws),
        timeline=first.timeline,
    )


def recommend(outcomes: Iterable[Scaled], late: float = 0.05) -> Scaled:
    """The cheapest policy that lets no more than this share of requests wait too long, else the quickest."""
    found = list(outcomes)
    if not found:
        raise LoadTestError("no policy was simulated: give one or more.")
    good = [outcome for outcome in found if outcome.late <= late]
    return min(good, key=lambda one: one.pod_minutes) if good else min(found, key=lambda one: one.late)


class _Pod:
    """A replica, from its start to the end of its last request; times in seconds."""

    def __init__(self, env: simpy.Environment, times: StageTimes, ready: float) -> None:
        self.replica = Replica(env, times)
        self.begun, self.ready = env.now, ready
        self.leaving = self.ended = math.inf

    def serves(self, now: float) -> bool:
        return self.ready <= now < self.leaving


class _Cluster:
    """Pods behind a round robin, and their autoscaler."""

    def __init__(self, times: StageTimes, policy: Policy, surge: Surge) -> None:
        self._env = simpy.Environment()
        self._times, self._policy, self._surge = times, policy, surge
        self._pods = [_Pod(self._env, times, 0.0) for _ in range(policy.minimum)]
        self._turn = count()
        self._advice: deque[tuple[float, int]] = deque()  # time and replicas, within the stabilization

    def run(self, mix: Sequence[Speech], allowed: float, seed: int) -> Scaled:
        rng = np.random.default_rng(seed)
        arrivals = self._surge.arrivals(rng)
        speeches = draw(mix, len(arrivals), rng)
        visits = [Visit(speech, at) for at, speech in zip(arrivals, speeches, strict=True)]
        self._env.process(self._arrive(visits))
        self._env.process(self._control())
        self._env.run(self._surge.seconds)
        return self._outcome(visits, allowed)

    def _arrive(self, visits: Sequence[Visit]) -> Process:
        for visit in visits:
            yield self._env.timeout(visit.came - self._env.now)
            serving = [pod for pod in self._pods if pod.serves(self._env.now)]
            pod = serving[next(self._turn) % len(serving)]
            self._env.process(pod.replica.speak(visit))

    def _control(self) -> Process:
        while True:
            yield self._env.timeout(self._policy.poll)
            now, policy = self._env.now, self._policy
            self._end_idle()
            kept = [pod for pod in self._pods if pod.leaving == math.inf]
            self._advice.append((now, policy.wanted(self._metric(), len(kept))))
            while self._advice[0][0] < now - policy.stabilization:
                self._advice.popleft()
            wanted = self._advice[-1][1]
            if wanted > len(kept):
                new = range(wanted - len(kept))
                self._pods += [_Pod(self._env, self._times, now + policy.start) for _ in new]
            else:
                for pod in kept[max(replicas for _, replicas in self._advice) :]:
                    pod.leaving = now

    def _metric(self) -> float:
        pods = [pod for pod in self._pods if pod.ended == math.inf]
        if self._policy.metric == "slots":
            return sum(pod.replica.language_model.active for pod in pods)
        return sum(pod.replica.visits for pod in pods)

    def _end_idle(self) -> None:
        for pod in self._pods:
            if pod.leaving < math.inf and pod.ended == math.inf and not pod.replica.visits:
                pod.ended = self._env.now

    def _outcome(self, visits: Sequence[Visit], allowed: float) -> Scaled:
        visits = [visit for visit in visits if visit.came + allowed < self._surge.seconds]
        waits = [visit.chunks[0][0] - visit.came if visit.chunks else math.inf for visit in visits]
        end, pods = self._surge.seconds, self._pods
        edges = np.arange(0, end, _BIN)
        changes = sorted({pod.begun for pod in pods})
        return Scaled(
            policy=self._policy,
            first_audio_p95=_p95(waits) or 0.0,
            late=sum(wait > allowed for wait in waits) / max(1, len(waits)),
            pod_minutes=sum(min(pod.ended, end) - pod.begun for pod in pods) / 60,
            most=max(sum(pod.begun <= at < pod.ended for pod in pods) for at in changes),
            timeline=tuple(self._moment(float(at), visits, waits) for at in edges),
        )

    def _moment(self, at: float, visits: Sequence[Visit], waits: Sequence[float]) -> Moment:
        here = [wait for visit, wait in zip(visits, waits, strict=True) if at <= visit.came < at + _BIN]
        served = sum(max(0.0, min(pod.leaving, at + _BIN) - max(pod.ready, at)) for pod in self._pods)
        return Moment(at, served / _BIN, _p95(here))


def _p95(waits: Sequence[float]) -> float | None:
    """With waits that never ended; numpy would interpolate between infinities."""
    return float(np.percentile(waits, 95, method="higher")) if waits else None
