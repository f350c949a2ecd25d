"""The templates of this package: `README.md` in Markdown, the page of a run in HTML."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jinja2
from rich.filesize import decimal as size

from hf_rocm_tune.publish.training_log import figures, shown_settings
from hf_rocm_tune.publish.values import code, count, figure, items, mapping, number, plain, prose, text
from hf_rocm_tune.publish.verdict import counted, coverage, crossed


def render(template: str, *, html: bool = False, **values: Any) -> str:
    """A template of this package, filled in.

    In HTML every value is escaped; in Markdown each foreign value must pass ``prose``, ``code``, ``json`` or
    ``literal``.
    """
    return compiled(template, html=html).render(values)


@cache
def compiled(template: str, *, html: bool) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_rocm_tune.publish", ""),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        function.__name__: function for function in (plain, figure, data_row, data_findings, prose, code)
    }
    environment.filters |= {"json": json.dumps, "literal": repr}
    shared = (text, number, count, items, mapping, figures, shown_settings, counted, coverage, crossed)
    environment.globals |= {function.__name__: function for function in shared} | {"size": size}
    return environment.get_template(template)


def data_row(row: Any) -> dict[str, str]:
    """What one split was trained on, in words."""
    share = 100 * count(row, "trained") / max(count(row, "kept"), 1)
    names = ("rows", "tokens", "median", "p95", "longest", "cut", "lost", "dropped")
    return {"split": text(row, "split"), **{name: f"{count(row, name):,}" for name in names}, "share": f"{share:.3g} %"}


def data_findings(row: Any) -> list[str]:
    """What of the rows of one split is not trained as they say, each in words."""
    return [
        f"{count(finding, 'rows'):,} rows: {text(finding, 'what')}"
        for finding in items(row, "findings")
        if text(finding, "what")
    ]
