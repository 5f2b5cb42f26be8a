"""Who computes next."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from cosytriton_ensemble.turns import Precedence, Turns

PATIENCE = 10  # seconds for what must happen
SOON = 0.2  # seconds in which what must not happen would have happened


def test_the_urgent_go_first_and_others_as_they_came() -> None:
    turns, order = Turns(), list[str]()

    def work(name: str) -> None:
        with turns.take(urgent=name.startswith("urgent")):
            order.append(name)

    threads = []
    with turns.take(urgent=False):
        for name in ("early", "late", "urgent 1", "urgent 2"):
            threads.append(threading.Thread(target=work, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) < len(threads):  # so that they come in this order
                pass
    for thread in threads:
        thread.join(5)
    assert order == ["urgent 1", "urgent 2", "early", "late"]


def test_one_at_a_time_and_a_failure_passes_the_turn_on() -> None:
    turns, inside, most = Turns(), 0, 0

    def work(number: int) -> None:
        nonlocal inside, most
        try:
            with turns.take(urgent=number % 2 == 0):
                inside += 1
                most = max(most, inside)
                inside -= 1
                if number % 3 == 0:
                    raise ValueError
        except ValueError:
            pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert most == 1


def test_what_is_not_urgent_waits_for_what_is_and_not_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "precedence"
    file.touch()
    computing = threading.Event()

    def work() -> None:
        with Precedence(file).turn(urgent=False):
            computing.set()
            release.wait(PATIENCE)

    release = threading.Event()
    thread = threading.Thread(target=work)
    with Precedence(file).turn(urgent=True), Precedence(file).turn(urgent=True):
        thread.start()
        assert not computing.wait(SOON)
    assert computing.wait(PATIENCE)
    with Precedence(file).turn(urgent=True):  # at once, though the other one computes
        release.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_process_that_dies_while_it_is_urgent_holds_nobody_up(tmp_path: Path) -> None:
    file = tmp_path / "precedence"
    file.touch()
    program = (
        "import sys, pathlib; from cosytriton_ensemble.turns import Precedence\n"
        "with Precedence(pathlib.Path(sys.argv[1])).turn(True): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        done = threading.Event()

        def work() -> None:
            with Precedence(file).turn(urgent=False):
                done.set()

        threading.Thread(target=work, daemon=True).start()
        assert not done.wait(SOON)
        other.kill()
        assert done.wait(PATIENCE)


def test_without_a_file_nobody_waits() -> None:
    with Precedence(None).turn(urgent=True), Precedence(None).turn(urgent=False):
        pass
