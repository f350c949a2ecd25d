"""HTML that cannot be broken by what it shows: text is escaped unless it is `Html` already."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """A piece of a page."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: str | None) -> Html:
    """An element.

    Args:
        children: `Html` as it is, anything else as text; None is nothing.
        attributes: without the underscore behind ``class_``, with "-" for "_"; None is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Pieces behind each other; see `tag`."""
    return Html(
        "".join(child if isinstance(child, Html) else escaped(child) for child in children if child is not None)
    )


def escaped(value: object) -> Html:
    """Any value as text. What no document may hold (control characters, half surrogates) becomes a mark."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return Html(html.escape(text))


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()) -> Html:
    """A table that scrolls by itself on a narrow screen; columns of ``numbers`` are aligned to the right."""
    right = frozenset(numbers)

    def line(cells: Sequence[object], name: str) -> Html:
        return tag("tr", *(tag(name, cell, class_="number" if at in right else None) for at, cell in enumerate(cells)))

    body = [line(row, "td") for row in rows]
    head = tag("thead", line(header, "th")) if any(header) else None
    return tag("div", tag("table", head, tag("tbody", *body)), class_="wide", tabindex="0", role="region")


def pairs(rows: Iterable[tuple[object, object]]) -> Html:
    """Names and values."""
    return tag("dl", *(join((tag("dt", name), tag("dd", value))) for name, value in rows))


def link(text: str, address: str) -> Html:
    """A link where the address is one of the web, else the text alone."""
    if not address.startswith(("https://", "http://")):
        return escaped(text)
    return tag("a", text, href=address, rel="noreferrer noopener")


def section(title: str, *children: object) -> Html:
    """A part of the page with a heading; nothing where there is nothing below it."""
    there = [child for child in children if child is not None and child != ""]
    return tag("section", tag("h2", title), *there) if there else Html("")
