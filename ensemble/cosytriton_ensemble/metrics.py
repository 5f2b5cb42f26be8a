"""The metrics that the Python models publish, beside Triton's own, and how one is read from the endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cosytriton_ensemble.generation import FinishReason

ACTIVE_REQUESTS = "cosytriton_requests_active"
FIRST_AUDIO = "cosytriton_first_audio_seconds"
CANCELLED_REQUESTS = "cosytriton_requests_cancelled_total"
REQUEST_ERRORS = "cosytriton_request_errors_total"
FLOW_STATE = "cosytriton_flow_state_bytes"
ACTIVE_SLOTS = "cosytriton_speech_lm_active"
SLOTS = "cosytriton_speech_lm_slots"
WAITING = "cosytriton_speech_lm_waiting"
LM_TOKENS = "cosytriton_speech_lm_tokens_total"
LM_STEPS = "cosytriton_speech_lm_steps_total"
LM_STEP_ROWS = "cosytriton_speech_lm_step_rows_total"
LM_ENDS = "cosytriton_speech_lm_ends_total"
KV_CACHE = "cosytriton_kv_cache_bytes"
PREFIX_CACHE = "cosytriton_prefix_cache_bytes"
MEMORY = "cosytriton_memory_bytes"

ERROR_KINDS = ("InputError", "QueueFullError", "GenerationError")
FIRST_AUDIO_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A family of metrics. Each has the label `model`, and `label` where it has one.

    Attributes:
        name: as Prometheus reads it.
        kind: of Prometheus.
        unit: of its value.
        meaning: one sentence; the `# HELP` of the endpoint.
        models: which publish it.
        label: a further label, or "".
        values: of that label; each is published from the start, so that a rate can be taken at once.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    models: tuple[str, ...]
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


_SPEAKERS, _STREAMS, _LM = ("tts", "tts_stream"), ("tts_stream",), ("speech_lm",)

METRICS = (
    Metric(ACTIVE_REQUESTS, "gauge", "requests", "Requests that are being spoken", _SPEAKERS),
    Metric(
        FIRST_AUDIO,
        "histogram",
        "seconds",
        "From a request's arrival at the model to its first response with audio; of tts the only one",
        _SPEAKERS,
        buckets=FIRST_AUDIO_BUCKETS,
    ),
    Metric(CANCELLED_REQUESTS, "counter", "requests", "Requests whose client left before the end", _SPEAKERS),
    Metric(
        REQUEST_ERRORS,
        "counter",
        "requests",
        "Requests that ended with an error, by its kind",
        _SPEAKERS,
        "kind",
        ERROR_KINDS,
    ),
    Metric(
        FLOW_STATE, "gauge", "bytes", "What streams and prompts keep of the flow (flow_state_mib)", _STREAMS
    ),
    Metric(ACTIVE_SLOTS, "gauge", "requests", "Requests that take part in the language model's steps", _LM),
    Metric(SLOTS, "gauge", "requests", "Requests that may take part in the language model's steps", _LM),
    Metric(WAITING, "gauge", "requests", "Requests that wait for the language model", _LM),
    Metric(LM_TOKENS, "counter", "tokens", "Speech tokens that the language model has made", _LM),
    Metric(LM_STEPS, "counter", "steps", "Shared steps of the language model, prompts not counted", _LM),
    Metric(
        LM_STEP_ROWS,
        "counter",
        "requests",
        "Sum of the batch sizes of these steps: divided by them it is the mean",
        _LM,
    ),
    Metric(
        LM_ENDS,
        "counter",
        "pieces",
        "Pieces of text whose speech is over, by why; repetition and silence are stops of the watchdog",
        _LM,
        "reason",
        get_args(FinishReason),
    ),
    Metric(
        KV_CACHE,
        "gauge",
        "bytes",
        "Keys and values of the active requests, each laid out as long as the longest",
        _LM,
    ),
    Metric(PREFIX_CACHE, "gauge", "bytes", "Keys and values that are kept of prompts (prefix_mib)", _LM),
    Metric(MEMORY, "gauge", "bytes", "Resident memory of the server and its models, added up", _LM),
)
"""The one table: what the models publish is made from it, and a test compares the endpoint with it."""


def read_metric(url: str, name: str, seconds: float = 5) -> float:
    """Sum of a metric over its labels; 0 when nobody publishes it. OSError when the endpoint is gone."""
    import urllib.request  # models, which only publish, do without

    with urllib.request.urlopen(f"{url}/metrics", timeout=seconds) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
