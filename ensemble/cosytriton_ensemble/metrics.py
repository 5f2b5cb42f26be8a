"""Names of the metrics that the Python models publish, and how they are read from the server's endpoint."""

from __future__ import annotations

ACTIVE_REQUESTS = "cosytriton_requests_active"  # requests that are being spoken, by model
ACTIVE_SLOTS = "cosytriton_speech_lm_active"  # requests that share the language model's steps


def read_metric(url: str, name: str, seconds: float = 5) -> float:
    """Sum of a metric over its labels; 0 when nobody publishes it. OSError when the endpoint is gone."""
    import urllib.request  # models, which only publish, do without

    with urllib.request.urlopen(f"{url}/metrics", timeout=seconds) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
