"""Listeners who ask for speech, for Locust (`cosytriton[loadtest]`); without `--headless` with its web page.

    locust -f loadtests/locustfile.py --headless --users 4 --run-time 60s --csv report
    locust -f loadtests/locustfile.py --headless --users 8 --run-time 5m --loop open --shape spike

Reports two request types for each scenario of the workload (`--workload`, default `loadtests/workload.toml`):
"first audio", the wait for the first chunk, and "whole speech", until the last one. A request that failed
counts once, as a failed "whole speech". `--host` is the server's address for gRPC (default `localhost:8001`),
`--http-url` that for HTTP. The options are also environment variables (`COSYTRITON_WORKLOAD` ...).
With `--master`, give `--expect-workers` too, so that each user of all workers asks for something else.

Locust rounds its percentiles: `--folder` keeps raw samples for `cosytriton loadtest`, which judges and plots
them. In a closed loop, the default, a slow server is asked less often, so that its waits look shorter than
they are at a fixed rate of arrivals: measure with `--loop open`.
"""

from locust import events

from cosytriton_loadtests import locust_setup
from cosytriton_loadtests.users import Listener

__all__ = ["Listener"]

locust_setup.register(events)
