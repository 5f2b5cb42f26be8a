"""The file that a report goes into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cosytriton_engines.errors import BuildError
from cosytriton_engines.report.html import render_html
from cosytriton_engines.report.markdown import render_markdown
from cosytriton_engines.report.report import Report

_RENDERERS: Mapping[str, Callable[[Report], str]] = {".html": render_html, ".md": render_markdown}


def check_name(path: Path) -> None:
    """Raise `BuildError` unless the name ends in .html or .md: before hours of building, not after."""
    if path.suffix not in _RENDERERS:
        raise BuildError(
            f"A report is named {' or '.join(_RENDERERS)}, not {path.name!r}; name it report.html."
        )


def write_report(report: Report, path: Path) -> None:
    """Write the page to a file, in the format that its name asks for; `BuildError` like `check_name`."""
    check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_RENDERERS[path.suffix](report), encoding="utf-8")
