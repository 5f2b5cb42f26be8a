"""`make soak`: hundreds of short requests, a third of them cancelled, and memory stays flat."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from cosytriton_client import Client, Voice

REQUESTS = 500
WARM_UP = 100
WORKERS = 4
GROWTH = 1.05


def resident(server: Any) -> dict[str, int]:
    """Bytes of the server and of each model process, by pid and command line."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return {f"{p.pid} {' '.join(p.cmdline()[1:2])[-60:]}": p.memory_info().rss for p in processes}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_500_requests_with_a_third_cancelled_leave_memory_flat(server: Any, slt: Voice) -> None:
    with Client(server.grpc_url) as client, ThreadPoolExecutor(WORKERS) as pool:

        def request(number: int) -> None:
            stream = client.stream("Thank you, please wait one moment.", slt, seed=number % 7)
            if number % 3 == 0:
                next(stream)
                stream.close()
            else:
                assert sum(chunk.token_count for chunk in stream) > 0

        list(pool.map(request, range(WARM_UP)))
        after_warm_up = resident(server)
        list(pool.map(request, range(WARM_UP, REQUESTS)))
        at_the_end = resident(server)
    print()
    for name, before in after_warm_up.items():
        print(f"{before / 2**20:8.1f} MiB -> {at_the_end[name] / 2**20:8.1f} MiB  {name}")
    total, total_end = sum(after_warm_up.values()), sum(at_the_end.values())
    assert total_end < GROWTH * total
    for name, before in after_warm_up.items():
        assert at_the_end[name] < GROWTH * before, name
