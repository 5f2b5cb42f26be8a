"""The configurations of untrained checkpoints: their sizes, and the text of their yaml files.

`cosyvoice.yaml`, `cosyvoice2.yaml` and `cosyvoice3.yaml` in this folder are the official files with a field
such as `{llm.width}` in the place of each size that differs between an official and a tiny checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from cosytriton_ensemble.families import Family
from cosytriton_export.templates.sizes import SIZES, Qwen, Size, Sizes

__all__ = ["SIZES", "Qwen", "Size", "Sizes", "config_text"]


def config_text(family: Family, sizes: Sizes) -> str:
    """The yaml file of a checkpoint of these sizes."""
    template = Path(__file__).with_name(family.config_file)
    return template.read_text(encoding="utf-8").format(**vars(sizes))
