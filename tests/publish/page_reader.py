"""What tests of the report read of a page."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.doctor.findings import link_of
from hf_rocm_tune.publish import page
from hf_rocm_tune.publish.history import Left
from hf_rocm_tune.publish.plots import panels, svg

_VOID = frozenset({"meta", "br", "img", "link", "input", "hr", "base"})


class Seen(HTMLParser):
    """Every element of a page, and whether they are closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in _VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def check_harmless(content: str) -> Seen:
    """A page that runs nothing and asks nobody for anything."""
    seen = Seen(content)
    assert {name for name, _ in seen.tags}.isdisjoint({"script", "img", "iframe", "object", "embed", "link", "form"})
    for name, attributes in seen.tags:
        assert not [key for key in attributes if key.startswith("on")]
        assert "src" not in attributes and "srcset" not in attributes
        address = attributes.get("href")
        if name == "a":
            assert address is not None and re.match(r"https?://", address)
        else:
            assert address is None or address.startswith("#")
    assert "@import" not in content
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", content))
    policy = next(dict(a)["content"] for n, a in seen.tags if n == "meta" and "http-equiv" in a)
    assert policy is not None and "default-src 'none'" in policy
    return seen


def page_of(left: Left, *, link: Callable[[str], str] = link_of) -> str:
    """The page without the command around it."""
    drawn = [(panel, svg(panel)) for panel in panels(left.rows, left.report)]
    return page.build(left, drawn, title="a run", link_of=link)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err
