"""Shapes of the load: how many users, when. Each stage has a name by which its figures are told apart."""

from __future__ import annotations

from dataclasses import dataclass

from cosytriton_loadtests.errors import LoadTestError

SHAPES = ("constant", "step", "spike", "soak")
PEAK = 3.0  # users of a spike, in relation to those before it
_STEPS = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage that is to come: its name, length in seconds, and users."""

    name: str
    seconds: float
    users: int


def planned(shape: str, users: int, seconds: float, peak: float = PEAK) -> tuple[Planned, ...]:
    """The stages of a shape.

    Args:
        shape: "constant" and "soak": the users all the time. "step": in four steps up to the users. "spike":
            the users, then `peak` times as many for a fifth of the time, then the users again.
        users: Locust users.
        seconds: of all stages together.
        peak: of the spike.

    Raises:
        LoadTestError: there is no such shape, or it cannot be made of so few users or seconds.
    """
    if shape not in SHAPES:
        raise LoadTestError(f"there is no shape {shape!r}; known are {', '.join(SHAPES)}.")
    least = _STEPS if shape == "step" else 1
    if users < least or seconds <= 0:
        raise LoadTestError(
            f"{users} users for {seconds:g} s: the shape {shape!r} needs {least} or more users, and a time."
        )
    if shape == "step":
        levels = [round(users * step / _STEPS) for step in range(1, _STEPS + 1)]
        return tuple(Planned(f"step {n}", seconds / _STEPS, level) for n, level in enumerate(levels, 1))
    if shape == "spike":
        high = max(users + 1, round(users * peak))
        around, within = 0.4 * seconds, 0.2 * seconds
        return (
            Planned("before", around, users),
            Planned("spike", within, high),
            Planned("after", around, users),
        )
    return (Planned("steady" if shape == "constant" else shape, seconds, users),)
