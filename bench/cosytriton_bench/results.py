"""The results of a run as JSON, so that a later run can be compared with them."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import psutil

from cosytriton_bench.errors import BenchError
from cosytriton_bench.measure import Figure, Figures
from cosytriton_bench.workload import Workload
from cosytriton_ensemble.families import FAMILIES
from cosytriton_ensemble.machine import Machine, Processor

FORMAT = 1
_TOOLS = ("onnxruntime", "torch", "numpy", "nvidia-pytriton")
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


def this_machine() -> dict[str, str | int | float]:
    """What the figures depend on beside the code."""
    processor = Processor.here()
    features = processor.features or frozenset()
    facts: dict[str, str | int | float] = {
        "cpu": processor.model or "unknown",
        "cores": processor.cores,
        "features": " ".join(name for name in _FEATURES if name in features),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": Machine.here().gpu or "none",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load": round(psutil.getloadavg()[0], 2),  # before the run
    }
    return facts | {tool: _version(tool) for tool in _TOOLS}


def _version(tool: str) -> str:
    try:
        return version(tool)
    except PackageNotFoundError:
        return "absent"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run found.

    Attributes:
        machine: where.
        settings: the workload and what was measured, including what the baseline is.
        figures: by name.
        roofline: rows of the roofline table, as `roofline.Row.facts`.
        date: when.

    """

    machine: Mapping[str, str | int | float]
    settings: Mapping[str, str | int | float | bool]
    figures: Figures
    roofline: tuple[Mapping[str, Any], ...] = ()
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        figures = {name: {"median": one.median, **asdict(one)} for name, one in self.figures.items()}
        content = {
            "format": FORMAT,
            "date": self.date,
            "machine": self.machine,
            "settings": self.settings,
            "figures": figures,
            "roofline": self.roofline,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; BenchError when it is something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise BenchError(
                    f"{path}: results of format {content['format']}, not {FORMAT}: measure anew."
                )
            figures = {
                name: Figure(one["unit"], tuple(map(float, one["samples"])))
                for name, one in content["figures"].items()
            }
            rows = tuple(content["roofline"])
            return cls(content["machine"], content["settings"], figures, rows, content["date"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{path}: no results of `cosytriton bench` ({type(error).__name__}: {error})."
            ) from error


def settings_of(work: Workload, checkpoint: str, baseline: str) -> dict[str, str | int | float | bool]:
    """The settings of a run; runs are comparable when they are equal."""
    return {
        "checkpoint": checkpoint,
        "family": work.family.name,
        "prompt_seconds": work.prompt_seconds,
        "speech_seconds": work.speech_seconds,
        "prompt_positions": work.prompt_positions,
        "threads": work.threads,
        "quick": work.quick,
        "baseline": baseline,
    }


def workload_of(settings: Mapping[str, Any]) -> Workload:
    """The request that the settings of a run describe."""
    return Workload(FAMILIES[settings["family"]], settings["prompt_seconds"], settings["speech_seconds"])
