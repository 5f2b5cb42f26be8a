"""Listeners who stream speech one request after another, for Locust (`cosytriton[loadtest]`).

    locust -f loadtests/locustfile.py --headless --users 4 --run-time 60s --csv report \
        --voice reference.wav --transcript "what is said in it"

Reports two request types: "first audio", the wait for the first chunk, and "whole speech", until the last
one. A failed request counts once, as a failed "whole speech". The options are also environment variables
(`COSYTRITON_VOICE` ...). Without `--host` the server is `localhost:8001`. This is a closed loop: a slow
server is asked less often, so at a fixed rate of arrivals the waits are longer than the ones seen here.
"""

from __future__ import annotations

import time
from typing import Any

import grpc.experimental.gevent
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from cosytriton_client import Client, ClientError, Voice

# Before the first channel: gRPC would otherwise block every user while one waits.
grpc.experimental.gevent.init_gevent()

MODEL = "tts_stream"
PAUSE = 1.0  # seconds after a failure, so that a server that refuses is not asked in a tight loop


def add_arguments(parser: LocustArgumentParser) -> None:
    """Add the options of the request."""
    group = parser.add_argument_group("cosytriton")
    group.add_argument("--voice", env_var="COSYTRITON_VOICE", required=True, help="reference audio")
    group.add_argument("--transcript", env_var="COSYTRITON_TRANSCRIPT", required=True, help="its words")
    group.add_argument(
        "--text",
        env_var="COSYTRITON_TEXT",
        default="one two three four five",
        help="what every user asks for",
    )


def read_voice(environment: Environment, **_: Any) -> None:
    """Read the voice once for all users; a wrong one ends the run before it starts."""
    options = environment.parsed_options
    assert options is not None
    try:
        Listener.voice = Voice.from_wav(options.voice, options.transcript)
    except ClientError as error:
        raise SystemExit(f"locust: error: {error}") from error


events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]
events.init.add_listener(read_voice)  # type: ignore[no-untyped-call]


class Listener(User):
    """Streams one sentence after another, with a seed of its own for each."""

    host = "localhost:8001"
    wait_time = constant(0)
    voice: Voice

    def on_start(self) -> None:
        """Connect."""
        self.text: str = self.environment.parsed_options.text
        self.speaker = Client(self.host)
        self.seed = 0

    def on_stop(self) -> None:
        """Close the connection."""
        self.speaker.close()

    @task
    def listen(self) -> None:
        """Stream once and report both waits."""
        self.seed += 1
        start, first, length = time.perf_counter(), 0.0, 0
        try:
            self.speaker.encode(self.voice)  # the first time only, and no part of the figures
            start = time.perf_counter()
            for chunk in self.speaker.stream(self.text, self.voice, seed=self.seed):
                first = first or time.perf_counter() - start
                length += chunk.samples.nbytes
        except ClientError as error:
            self._report("whole speech", time.perf_counter() - start, exception=error)
            time.sleep(PAUSE)
        else:
            self._report("first audio", first)
            self._report("whole speech", time.perf_counter() - start, length)

    def _report(self, kind: str, seconds: float, length: int = 0, exception: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=MODEL,
            response_time=seconds * 1000,
            response_length=length,
            exception=exception,
            context=self.context(),
        )
