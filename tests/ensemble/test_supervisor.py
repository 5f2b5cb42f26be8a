"""When the supervisor restarts a server and when not: a fake one here, the real one in tests/serving."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosytriton_ensemble import supervisor
from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.health import NotReadyYet
from cosytriton_ensemble.server import ServerOptions
from cosytriton_ensemble.supervisor import Supervisor


class World:
    """A server that lives as the test says; counts what the supervisor does to it."""

    def __init__(self) -> None:
        self.starts = self.kills = 0
        self.models = {1, 2}
        self.running_now = True
        self.alive: Callable[[], None] = lambda: None
        self.ready: Callable[[], None] = lambda: None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        self.starts += 1
        self.models, self.running_now = {1, 2}, True

    def kill(self) -> None:
        self.kills += 1

    def running(self) -> bool:
        return self.running_now

    def model_processes(self) -> set[int]:
        return set(self.models)

    def server_version(self) -> str:
        return "2.51.0"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    class Check:
        def __init__(self, *_: object) -> None:
            self.server_version = world.server_version

        def alive(self) -> None:
            world.alive()

        def ready(self) -> None:
            world.ready()

    monkeypatch.setattr(supervisor, "TritonServer", lambda _: world)
    monkeypatch.setattr(supervisor, "HealthCheck", Check)
    monkeypatch.setattr(supervisor, "WATCH_PERIOD", 0.01)
    monkeypatch.setattr(supervisor, "LIVENESS_PERIOD", 0.02)
    return world


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(world: World, happens: Callable[[], None], then: Callable[[], bool]) -> int:
    """Serve until ready, let something happen, wait for its consequence; how often it became ready."""
    readies: list[str] = []
    running = Supervisor(ServerOptions(Path("unused")), readies.append)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        eventually(lambda: len(readies) == 1)
        happens()
        eventually(then)
        eventually(lambda: len(readies) == world.starts)
    finally:
        running.stop()
        thread.join(5)
    assert not thread.is_alive()
    return len(readies)


def test_a_dead_model_means_a_new_server(world: World) -> None:
    assert run(world, lambda: world.models.discard(2), lambda: world.starts == 2) == 2
    assert world.kills == 1


def test_a_server_that_ended_is_started_again(world: World) -> None:
    def end() -> None:
        world.running_now = False

    assert run(world, end, lambda: world.starts == 2) == 2


def test_a_server_that_hangs_is_started_again(world: World) -> None:
    def hang() -> None:
        def no_answer() -> None:
            if world.starts == 1:
                raise ServerError("flow gave no answer")

        world.alive = no_answer

    assert run(world, hang, lambda: world.starts == 2) == 2


def test_one_late_answer_is_forgiven(world: World) -> None:
    calls: list[int] = []

    def late_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ServerError("late")

    def happens() -> None:
        world.alive = late_once

    assert run(world, happens, lambda: len(calls) > 5) == 1
    assert world.kills == 0


def test_it_waits_while_models_load(world: World) -> None:
    loading = [1, 1, 1]

    def ready() -> None:
        if loading:
            loading.pop()
            raise NotReadyYet("loading")

    world.ready = ready
    assert run(world, lambda: None, lambda: True) == 1


def test_a_server_that_never_gets_ready_is_an_error(world: World) -> None:
    world.running_now = False
    world.start = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="ended before it was ready"):
        Supervisor(ServerOptions(Path("unused"))).run()
