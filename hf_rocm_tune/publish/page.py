"""The report of a run as one HTML page: no script, no request to anywhere, light and dark, readable on a phone.

Everything foreign is escaped, and should that fail, the page's own policy lets no script run and nothing be fetched.
Local paths, names of users and hosts and secrets are taken out, so that the page may be shown to others.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hf_rocm_tune.publish import page_sections as parts
from hf_rocm_tune.publish.history_read import Left
from hf_rocm_tune.publish.history_values import text
from hf_rocm_tune.publish.history_verdict import judge
from hf_rocm_tune.publish.page_html import Html, join, section, tag
from hf_rocm_tune.publish.plots import Panel
from hf_rocm_tune.publish.privacy import Private, scrub_json, scrub_text
from hf_rocm_tune.version import __version__

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def clean(left: Left, private: Private) -> Left:
    """What is left of a run without what is private on this machine."""
    return replace(
        left,
        trained=scrub_json(left.trained, private),
        report=scrub_json(left.report, private),
        settings=scrub_json(left.settings, private),
        journal=scrub_json(left.journal, private),
        missing=[scrub_text(line, private) for line in left.missing],
    )


def build(
    left: Left, drawn: Sequence[tuple[Panel, str]], *, title: str, link_of: Callable[[str], str] = lambda _: ""
) -> str:
    """The page.

    Args:
        left: what the run left, see `clean`.
        drawn: each panel with its ``<svg>`` element.
        title: name of the run.
        link_of: the address of a finding's source; empty where none is known.
    """
    verdict = judge(left.report, finished=left.finished, damaged=left.damaged)
    body = join(
        (
            tag("header", tag("h1", title), tag("p", _about(left), class_="about")),
            parts.verdict(verdict),
            parts.missing(left),
            parts.tiles(left),
            _plots(drawn),
            parts.incidents(left.report),
            parts.integrity(left.report),
            parts.events(left),
            parts.findings(left.report, link_of),
            parts.settings(left),
            parts.machine(left.report),
            tag("p", f"Written by hf-rocm-tune {__version__}.", class_="quiet"),
        )
    )
    return _document(title, body)


def _document(title: str, body: Html) -> str:
    style = (importlib.resources.files(__package__) / "page_style.css").read_text(encoding="utf-8")
    head = join(
        (
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="referrer" content="no-referrer">'),
            tag("title", f"{title}: training report"),
            tag("style", Html(style)),
        )
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{body}</main></body></html>\n'


def _about(left: Left) -> str:
    found = left.inspection.manifest
    device: Mapping[str, object] = left.report
    said = [
        f"run {left.run_id}" if left.run_id else "",
        f"finished {_when(found.created)}" if found is not None and found.status == "final" else "",
        f"checkpoint of {_when(found.created)}" if found is not None and found.status == "checkpoint" else "",
        text(device, "device", "name"),
        text(left.trained, "method"),
    ]
    return ", ".join(filter(None, said))


def _when(moment: str) -> str:
    """A moment in UTC, ISO 8601, to the minute."""
    return f"{moment[:16].replace('T', ' ')} UTC" if moment.endswith("+00:00") else moment


def _plots(drawn: Sequence[tuple[Panel, str]]) -> Html:
    figures = [tag("figure", Html(svg), role="img", aria_label=panel.in_words()) for panel, svg in drawn]
    return section("Curves", tag("div", *figures, class_="plots")) if figures else Html("")
