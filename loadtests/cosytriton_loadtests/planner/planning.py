"""What `cosytriton loadtest plan` answers: how many replicas, and how they should be scaled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.limits import Limits
from cosytriton_loadtests.planner.autoscaling import Policy, Scaled, Surge, mean_of, recommend, scale
from cosytriton_loadtests.planner.calibration import from_run, mix_of_run, slowed
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.replicas import MOST_REPLICAS, Plan, capacity, look_out, plan
from cosytriton_loadtests.planner.stage_times import StageTimes, from_bench
from cosytriton_loadtests.run_folder import RunFolder

FILE, TIMES_FILE = "plan.json", "stage_times.json"
FIRST_AUDIO = "first_audio_p95"
LATE = 1.0  # seconds of first audio beyond which a request is late, where no limit says so
_DRAWS = 3  # of the requests that each policy meets
_TARGETS = (0.25, 0.5, 0.75)  # of the requests that are active in a replica at its capacity


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is to be planned.

    Attributes:
        rate: requests a second that are to be carried.
        limits: what is promised.
        load: folder of a load test at a low rate, which gives the stage times and the mix.
        busy: folder of a load test near the capacity, which tells how much stages slow each other.
        times: stage times that an earlier plan wrote, instead of the load test's.
        bench: results.json of `cosytriton bench`, instead of the run.
        profile: of the benchmark.
        speech: seconds of speech of the requests, each as likely as the others, instead of its mix.
        cores: of a replica; None: as measured.
        most: replicas at most.
        surge: by how much the rate rises in a spike; 0: autoscaling is not simulated.
        start: seconds until a new pod is ready.
        seed: of arrivals and choices.
    """

    rate: float
    limits: Limits
    load: Path | None = None
    busy: Path | None = None
    times: Path | None = None
    bench: Path | None = None
    profile: str = "cpu"
    speech: tuple[float, ...] = ()
    cores: float | None = None
    most: int = MOST_REPLICAS
    surge: float = 0.0
    start: float = 60.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planning:
    """The answer.

    Attributes:
        capacity: requests a second that one replica carries.
        active: requests that are active in it then, on average.
        plan: for the rate.
        scaled: what each autoscaling policy came to in the spike.
        recommended: the cheapest that is good enough; None: autoscaling was not simulated.
    """

    capacity: float
    active: float
    plan: Plan
    scaled: tuple[Scaled, ...] = ()
    recommended: Scaled | None = None

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"one replica carries {self.capacity:.3g} requests/s; {self.active:.1f} are active then"
        yield "replicas  first audio p50, p95 s   c100   utilisation"
        for one in self.plan.outlooks:
            waits = f"{one.first_audio_p50:.2f}, {one.first_audio_p95:.2f}"
            yield f"{one.replicas:8}  {waits:>22}  {one.c100:5.2f}  {one.utilisation:11.0%}  {one.reason}"
        for outcome in self.scaled:
            sign = "*" if outcome is self.recommended else " "
            yield (
                f"{sign} {outcome.policy}: first audio p95 {outcome.first_audio_p95:.2f} s, "
                f"late {outcome.late:.1%}, {outcome.pod_minutes:.0f} pod-minutes, {outcome.most} pods at most"
            )


def make_plan(options: PlanOptions, folder: Path) -> Planning:
    """Plan, and write `plan.json` and `stage_times.json` to the folder.

    Raises:
        LoadTestError: nothing was measured, or no number of replicas keeps the limits.
    """
    times, mix = _measured(options)
    folder.mkdir(parents=True, exist_ok=True)
    times.write(folder / TIMES_FILE)
    most = capacity(times, mix, options.limits)
    active = look_out(times, most, mix, options.limits).active
    found = plan(times, options.rate, mix, options.limits, most=options.most, seed=options.seed)
    planning = Planning(most, active, found)
    if options.surge:
        scaled = tuple(_scaled(options, times, mix, planning))
        planning = replace(planning, scaled=scaled, recommended=recommend(scaled))
    (folder / FILE).write_text(json.dumps(asdict(planning), indent=2) + "\n", encoding="utf-8")
    return planning


def _measured(options: PlanOptions) -> tuple[StageTimes, list[Speech]]:
    """Stage times and the mix."""
    run = RunFolder(options.load) if options.load else None
    if options.times:
        times = StageTimes.read(options.times)
    elif options.bench:
        times = from_bench(options.bench, options.profile)
    elif run:
        times = from_run(run)
    else:
        raise LoadTestError(
            "nothing was measured: give the folder of a load test at a low rate, stage times, or the "
            "results.json of `cosytriton bench`."
        )
    if options.busy:
        times = slowed(times, RunFolder(options.busy))
    if options.cores:
        times = replace(times, cores=options.cores)
    if options.speech:
        rate = times.rates.token_rate
        return times, [Speech(f"{s:g} s", "grpc-stream", (round(s * rate),)) for s in options.speech]
    if run is None:
        raise LoadTestError("the mix is unknown: give the folder of a load test, or seconds of speech.")
    return times, mix_of_run(run)


def _scaled(
    options: PlanOptions, times: StageTimes, mix: Sequence[Speech], planning: Planning
) -> Iterator[Scaled]:
    """Policies in a spike; the last three differ from the middle one in one way each."""
    surge = Surge(options.rate, options.surge * options.rate)
    allowed = {**options.limits.each, **options.limits.all}.get(FIRST_AUDIO, LATE)
    targets = [round(share * planning.active, 1) for share in _TARGETS]
    pods = max(2, 2 * round(surge.peak / planning.capacity))
    base = Policy("requests", 1.0, maximum=pods, start=options.start)
    middle = replace(base, target=targets[1])
    policies = [replace(base, target=target) for target in targets]
    policies += [
        replace(middle, minimum=2),
        replace(middle, metric="slots"),
        replace(middle, stabilization=60.0),
    ]
    for policy in policies:
        seeds = range(options.seed, options.seed + _DRAWS)
        yield mean_of([scale(times, mix, surge, policy, allowed, seed) for seed in seeds])
