"""The shape of every weight of a checkpoint under its official key, from the configuration.

This is the file format, said independently of the modules that compute with it; the checkpoint writer fills
it with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_export.shapes.flow import flow_shapes_1, flow_shapes_2, flow_shapes_3
from cosytriton_export.shapes.hift import hift_shapes_1_2, hift_shapes_3
from cosytriton_export.shapes.layers import Shapes
from cosytriton_export.shapes.llm import llm_shapes_1, llm_shapes_2, llm_shapes_3

__all__ = ["Shapes", "state_shapes"]

_Shaper = Callable[[Mapping[str, Any], Mapping[str, Any]], Shapes]
_SHAPERS: dict[str, dict[str, _Shaper]] = {
    COSYVOICE1.name: {"llm": llm_shapes_1, "flow": flow_shapes_1, "hift": hift_shapes_1_2},
    COSYVOICE2.name: {"llm": llm_shapes_2, "flow": flow_shapes_2, "hift": hift_shapes_1_2},
    COSYVOICE3.name: {"llm": llm_shapes_3, "flow": flow_shapes_3, "hift": hift_shapes_3},
}


def state_shapes(
    family: Family, name: str, config: Mapping[str, Any], qwen: Mapping[str, Any] | None = None
) -> Shapes:
    """Shapes of `<name>.pt` ("llm", "flow" or "hift") by key.

    `config` is the yaml file; `qwen` is Qwen2's config.json, for the language models of v2 and v3.
    """
    return _SHAPERS[family.name][name](config, qwen or {})
