"""What the looks at a server add up to: times of each model, series over time, memory that grew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cosytriton_ensemble.metrics import ACTIVE_SLOTS, LM_ENDS, WAITING
from cosytriton_loadtests.server_watch import Look

CALLERS = {"tts", "tts_stream", "voice_encoder"}  # most of their time is that of the models they call
COUNT, EXECUTIONS = "nv_inference_count", "nv_inference_exec_count"
QUEUE, COMPUTE = "nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us"
PENDING = "nv_inference_pending_request_count"
HITS, MISSES = "nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model"
GPU_MEMORY, GPU_USE = "nv_gpu_memory_used_bytes", "nv_gpu_utilization"
SHM = "/dev/shm"
GROWTH_SHARE = 0.2  # of the looks: the first and the last of them are compared
FLOOR = 10  # percentile of their memory: what is held for requests comes and goes with them, what leaks stays
GROWTH_NOISE = 4 << 20  # bytes by which a process may grow unseen: an arena more of its allocator

Series = tuple[list[float], list[float]]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What one model did between two times.

    Attributes:
        model: its name.
        requests: inferences that it computed, those from the cache left out.
        executions: calls of the graph, each with a batch of them.
        queue, compute: seconds, summed over requests.
        hits, misses: of the response cache.
    """

    model: str
    requests: float = 0.0
    executions: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    hits: float = 0.0
    misses: float = 0.0

    @property
    def batch(self) -> float:
        """Mean size of a batch."""
        return self.requests / self.executions if self.executions else 0.0

    def each(self, seconds: float) -> float:
        """Seconds for one request."""
        return seconds / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that a process (or shared memory) held at least when it had settled, and at the end."""

    name: str
    before: float
    after: float

    @property
    def share(self) -> float:
        """By what share it grew; 0 within the noise of an allocator."""
        grown = self.after - self.before
        return grown / self.before if grown > GROWTH_NOISE and self.before else 0.0


def between(looks: Sequence[Look], begin: float, end: float = float("inf")) -> list[Look]:
    """Looks of a time, and the last one before it, from which counters are counted."""
    before = [look for look in looks if look.at < begin][-1:]
    return before + [look for look in looks if begin <= look.at <= end]


def counted(looks: Sequence[Look], name: str) -> dict[str, float]:
    """By how much a counter went up, for each model; a server that began anew counts from zero."""
    values = [look.metrics[name] for look in looks if name in look.metrics]
    models = dict.fromkeys(model for value in values for model in value)
    return {model: sum(_rises([value.get(model, 0.0) for value in values])) for model in models}


def model_loads(looks: Sequence[Look]) -> dict[str, ModelLoad]:
    """What each model did; the one that took most of the time first."""
    names = (COUNT, EXECUTIONS, QUEUE, COMPUTE, HITS, MISSES)
    counts = [counted(looks, name) for name in names]
    ends = {model: pieces for model, pieces in counted(looks, LM_ENDS).items() if pieces}
    loads = [
        ModelLoad(
            model, *(found.get(model, 0.0) * _unit(name) for name, found in zip(names, counts, strict=True))
        )
        for model in counts[0].keys() - ends.keys()
    ]
    loads += [
        ModelLoad(model, pieces, 0, *_in_language_model(looks, model)) for model, pieces in ends.items()
    ]
    return {load.model: load for load in sorted(loads, key=lambda load: -load.queue - load.compute)}


def _in_language_model(looks: Sequence[Look], model: str) -> tuple[float, float]:
    """Seconds that requests waited for and spent in it: the areas below two gauges (Little's law).

    Triton counts only the moment in which its decoupled models take a request.
    """
    queue, compute = (gauges(looks, name).get(model, ([], [])) for name in (WAITING, ACTIVE_SLOTS))
    return _area(*queue), _area(*compute)


def rates(looks: Sequence[Look], name: str, over: str = "") -> dict[str, Series]:
    """A counter's rise between two looks, by model: in a second, or for each rise of `over`."""
    found: dict[str, Series] = {}
    for former, look in pairwise(looks):
        rise = counted((former, look), name)
        base = counted((former, look), over) if over else {}
        for model, value in rise.items():
            amount = base.get(model, 0.0) if over else look.at - former.at
            if amount > 0:
                _append(found, model, look.at, value * _unit(name) / amount)
    return found


def gauges(looks: Sequence[Look], name: str) -> dict[str, Series]:
    """A gauge over time, by model."""
    return _series(looks, lambda look: look.metrics.get(name, {}))


def memory(looks: Sequence[Look]) -> dict[str, Series]:
    """Resident bytes over time, by process; those of one name are summed."""
    return _series(looks, lambda look: _sums(look, lambda process: process.memory))


def cpu(looks: Sequence[Look]) -> dict[str, Series]:
    """Cores in use over time, by process."""
    spent = _series(looks, lambda look: _sums(look, lambda process: process.cpu))
    return {
        name: (
            times[1:],
            [rise / (b - a) for rise, (a, b) in zip(_rises(values), pairwise(times), strict=True)],
        )
        for name, (times, values) in spent.items()
    }


def growth(looks: Sequence[Look]) -> list[Growth]:
    """By how much the floor rose from the first looks to the last ones, the worst first.

    Of each process, and of shared memory.
    """
    found = memory(looks)
    shared = [(look.at, float(look.shared_memory)) for look in looks if look.processes]
    if shared:
        found[SHM] = ([at for at, _ in shared], [value for _, value in shared])
    grown = []
    for name, (_, values) in found.items():
        part = max(1, int(len(values) * GROWTH_SHARE))
        before, after = (float(np.percentile(looked, FLOOR)) for looked in (values[:part], values[-part:]))
        grown.append(Growth(name, before, after))
    return sorted(grown, key=lambda one: -one.share)


def _sums(look: Look, value: Callable[..., float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for process in look.processes:
        sums[process.name] = sums.get(process.name, 0.0) + value(process)
    return sums


def _series(looks: Sequence[Look], read: Callable[[Look], Mapping[str, float]]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for look in looks:
        for name, value in read(look).items():
            _append(found, name, look.at, value)
    return found


def _append(found: dict[str, Series], name: str, at: float, value: float) -> None:
    times, values = found.setdefault(name, ([], []))
    times.append(at)
    values.append(value)


def _rises(values: Sequence[float]) -> list[float]:
    """Differences of a counter; after a fall it began at zero."""
    return [after - before if after >= before else after for before, after in pairwise(values)]


def _area(times: Sequence[float], values: Sequence[float]) -> float:
    """Area below a curve of straight lines."""
    pairs = zip(pairwise(times), pairwise(values), strict=True)
    return sum((after - before) * (a + b) / 2 for (before, after), (a, b) in pairs)


def _unit(name: str) -> float:
    return 1e-6 if name.endswith("_us") else 1.0
