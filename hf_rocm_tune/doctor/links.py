"""Addresses of the sources that rows name."""

from __future__ import annotations

from hf_rocm_tune.doctor.rows import knowledge_data
from hf_rocm_tune.machine.variables import issue_link, links_of


def link_of(source: str) -> str:
    """The address of one source; empty where none is certain."""
    known = knowledge_data("addresses.toml")
    own = issue_link(source, known["repositories"]) or known["pages"].get(source, "")
    return own or next(iter(links_of(source)), "")
