"""HTML and SVG elements whose text is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Self

_VOID = frozenset({"meta", "img"})  # shapes of SVG need an end in HTML too


class Markup(str):
    """Text that is HTML; everything else is escaped before it becomes a part of the page."""

    __slots__ = ()

    @classmethod
    def of(cls, content: str) -> Self:
        """Markup as it is, other text escaped."""
        return cls(content if isinstance(content, Markup) else escape(content))


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """`<name attribute="...">content</name>`.

    Attribute names are written with underscores: `aria_label`, `class_`. None leaves an attribute out.
    """
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(given)}>"
    return Markup(start if name in _VOID else f"{start}{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    """Several pieces, one after another."""
    return Markup("".join(Markup.of(piece) for piece in content))


def table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numeric: frozenset[int], caption: str
) -> Markup:
    """A table that scrolls sideways where it is too wide; `numeric` columns are aligned on the right.

    The first column heads its row.
    """

    def kind(column: int) -> str | None:
        return "number" if column in numeric else None

    heads = (element("th", text, scope="col", class_=kind(i)) for i, text in enumerate(head))
    body = []
    for first, *rest in rows:
        cells = (element("td", text, class_=kind(i)) for i, text in enumerate(rest, 1))
        body.append(element("tr", element("th", first, scope="row"), *cells))
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", *heads)),
            element("tbody", *body),
        ),
        class_="wide",
        tabindex=0,  # scrolls by keyboard
        role="region",
        aria_label=caption,
    )
