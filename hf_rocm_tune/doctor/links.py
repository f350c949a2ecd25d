"""Addresses of the sources that rows name."""

from __future__ import annotations

import re

from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.environ.links import links_of

_ISSUE = re.compile(r"(?P<where>[A-Za-z0-9./-]+)#(?P<number>[0-9]+)")


def link_of(source: str) -> str:
    """The address of one source; empty where none is certain."""
    known = knowledge_data("addresses.toml")
    issue = _ISSUE.fullmatch(source)
    if issue and issue["where"] in known["repositories"]:
        # GitHub leads from an issue's address to a pull request of that number.
        return f"https://github.com/{known['repositories'][issue['where']]}/issues/{issue['number']}"
    return known["pages"].get(source) or next(iter(links_of(source)), "")
