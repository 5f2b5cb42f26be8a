"""The figures of a run on the real server, against a clock that stands between client and server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cosytriton_loadtests import statistics
from cosytriton_loadtests.run import LoadOptions, run_load

WORKLOAD = """
[texts]
en = ["Hello, how are you today?", "Please wait one moment.", "My name is number five."]
[voices.known]
wav = "{wav}"
transcript = "he might even have been made amiable himself"
[scenarios.english]
texts = ["en"]
voices = ["known"]
"""


STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Clock(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands every message on; notes for each stream when it came, and when each of its chunks went by."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._times: list[list[float]] = []

    def service(self, details: Any) -> Any:
        """A unary call is a stream of one message, so that one kind of handler does for all."""
        call = self._channel.stream_stream(details.method)

        def forward(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            times = [time.perf_counter()]
            if details.method == STREAM:
                self._times.append(times)
            answers = call(messages)
            context.add_callback(answers.cancel)
            for answer in answers:
                if b"waveform" in answer:
                    times.append(time.perf_counter())
                yield answer

        return grpc.stream_stream_rpc_method_handler(forward)

    def waits(self, chunk: int) -> list[float]:
        """Seconds until the chunk with this index, of every stream."""
        return [times[1:][chunk] - times[0] for times in self._times]


@contextmanager
def clock_before(url: str) -> Iterator[tuple[Clock, str]]:
    """A clock before the server at `url`, and the address to call instead."""
    with grpc.insecure_channel(url, UNLIMITED) as channel:
        clock = Clock(channel)
        server = grpc.server(ThreadPoolExecutor(32), [clock], options=UNLIMITED)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield clock, f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.loadtest
def test_percentiles_are_those_of_an_independent_clock(server: Any, tmp_path: Path) -> None:
    wav = Path(__file__).parents[1] / "data" / "librivox_austen.wav"
    workload = tmp_path / "workload.toml"
    workload.write_text(WORKLOAD.format(wav=wav))
    with clock_before(server.grpc_url) as (clock, url):
        options = LoadOptions(url, metrics_url="", workload=workload, users=2, seconds=20, warm_up=0)
        whole = statistics.of_run(run_load(options, tmp_path / "run"))[0]
    assert whole.failed == 0
    assert whole.requests == len(clock.waits(0)) > 20
    for measure, times in (("first_audio", clock.waits(0)), ("whole", clock.waits(-1))):
        for percentile in (50, 90, 95, 99, 100):
            name = f"{measure}_p{percentile}" if percentile < 100 else f"{measure}_max"
            seen, expected = whole.value(name), float(np.percentile(times, percentile))
            print(f"{name}: {seen:.4f} s, by the independent clock {expected:.4f} s")
            assert seen == pytest.approx(expected, rel=0.02)
