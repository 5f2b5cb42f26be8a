"""What each stage of the server costs, as measured: the planner's only knowledge of a machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_ensemble.families import FAMILIES, Family
from cosytriton_loadtests.errors import LoadTestError

FORMAT = 1
PAST = 0.2
"""What a token that a stream's flow has behind it costs, over a new one (`streaming_flow`)."""
_SHORT_SECONDS = 0.6  # of reference and of speech in the short requests of `cosytriton bench`


@dataclass(frozen=True, slots=True)
class Cost:
    """Core seconds of a call: `call + token * tokens`.

    Attributes:
        call: of any call.
        token: of each token that the call is about (of the language model: position or row).
        width: cores that it keeps busy when it runs alone.
    """

    call: float = 0.0
    token: float = 0.0
    width: float = 1.0

    def work(self, tokens: float) -> float:
        """Core seconds."""
        return self.call + self.token * tokens


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Costs of every stage, and the sizes that they go with.

    Attributes:
        family: name of the model's family.
        cores: of the machine that a replica has to itself.
        request: what a request costs before the language model: transport, reading, text front end.
        prefill: the prompt in the language model; token: a position that is not kept from earlier ones.
        step: a step of the language model; token: a row. Handing the tokens on is part of it.
        flow: the flow in one piece; token: one of the speech, or of the prompt.
        flow_stream: a chunk of the flow with its state; token: a new one.
        vocoder: the vocoder; token: one that is spoken.
        chunk: sending a chunk, and what its listener does with it where he is on the same machine.
        slowdown: how much longer work takes while all cores are busy.
        latency: seconds until a chunk reaches its listener that are nobody's work.
        prompt_tokens: speech tokens of the reference.
        prompt_positions: of the language model's prompt that each request feeds anew.
        slots: requests that share each step of the language model.
        max_waiting: requests beyond them before they are refused.
        chunk_positions: of a prompt that are fed between two steps.
    """

    family: str
    cores: float
    request: Cost
    prefill: Cost
    step: Cost
    flow: Cost
    flow_stream: Cost
    vocoder: Cost
    chunk: Cost = field(default_factory=Cost)
    slowdown: float = 1.0
    latency: float = 0.0
    prompt_tokens: int = 75
    prompt_positions: int = 100
    slots: int = 8
    max_waiting: int = 64
    chunk_positions: int = 128

    @property
    def rates(self) -> Family:
        """The family's rates and sizes."""
        return FAMILIES[self.family]

    def write(self, path: Path) -> None:
        """Write as JSON."""
        content = {"format": FORMAT} | asdict(self)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> StageTimes:
        """Read what `write` wrote.

        Raises:
            LoadTestError: it is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT or content["family"] not in FAMILIES:
                raise ValueError("its format or its family is unknown")
            costs = {one.name: Cost(**content[one.name]) for one in fields(cls) if one.type == "Cost"}
            return cls(**content | costs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LoadTestError(
                f"{path}: these are no stage times ({error}). Make them from the folder of a load test at a "
                "low rate, or from the results.json of `cosytriton bench`."
            ) from error


def line(tokens: list[float], seconds: list[float], width: float = 1.0) -> Cost:
    """The cost that fits measured core seconds best; neither part is negative."""
    slope, start = np.polyfit(tokens, seconds, 1) if len(set(tokens)) > 1 else (0.0, float(np.mean(seconds)))
    if start < 0:
        slope, start = float(np.dot(tokens, seconds) / np.dot(tokens, tokens)), 0.0
    if slope < 0:
        slope, start = 0.0, float(np.mean(seconds))
    return Cost(float(start), float(slope), max(1.0, width))


def from_bench(path: Path, profile: str) -> StageTimes:
    """Stage times of a profile from the results of `cosytriton bench`.

    The benchmark measures the flow in one piece; a chunk of a stream costs the same for each new token and
    `PAST` of it for each one before. What a request costs beside its stages is left out: a few milliseconds.

    Raises:
        LoadTestError: it is another file, or one without a figure of the profile that is needed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _Bench(content, profile).stage_times()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadTestError(
            f"{path}: no results of `cosytriton bench` with the stages in the profile {profile} ({error}). "
            "Let it measure every stage."
        ) from error


class _Bench:
    def __init__(self, content: dict[str, Any], profile: str) -> None:
        self._figures, self._settings = content["figures"], content["settings"]
        self._machine, self._profile = content["machine"], profile

    def _cpu(self, name: str) -> float:
        return float(self._figures[f"{name}:cpu/{self._profile}"]["median"])

    def _wall(self, name: str) -> float:
        return float(self._figures[f"{name}/{self._profile}"]["median"])

    def _width(self, name: str) -> float:
        return self._cpu(name) / self._wall(name)

    def stage_times(self) -> StageTimes:
        settings, family = self._settings, FAMILIES[self._settings["family"]]
        prompt, speech = (settings[f"{what}_seconds"] * family.token_rate for what in ("prompt", "speech"))
        short = _SHORT_SECONDS * family.token_rate
        rows = sorted(
            int(name.split("/")[0].removeprefix("lm_decode_b"))
            for name in self._figures
            if name.startswith("lm_decode_b") and name.endswith(f"/{self._profile}") and ":" not in name
        )
        steps = [f"lm_decode_b{count}" for count in rows]
        flow = self._native("flow", 2 * short, prompt + speech)
        return StageTimes(
            family=family.name,
            cores=self._machine["cores"],
            request=Cost(),
            prefill=Cost(
                0.0, self._cpu("lm_prefill") / settings["prompt_positions"], self._width("lm_prefill")
            ),
            step=line([float(n) for n in rows], [*map(self._cpu, steps)], self._width(steps[-1])),
            flow=flow,
            flow_stream=flow,
            vocoder=self._native("vocoder", short, speech),
            prompt_tokens=round(prompt),
            prompt_positions=settings["prompt_positions"],
        )

    def _native(self, name: str, short: float, long: float) -> Cost:
        seconds = [self._cpu(f"{name}_short_b1"), self._cpu(name)]
        return line([short, long], seconds, self._width(name))
