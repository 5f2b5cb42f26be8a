"""Who computes next."""

from __future__ import annotations

import threading

from cosytriton_ensemble.turns import Turns


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
