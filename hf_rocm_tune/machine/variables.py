"""Environment variables: set, keep or warn, each with its reason and source, before torch is imported.

Reading order: ``rules`` (what a row is), ``policy`` (all rows, from ``rows_*``), ``links`` (their addresses),
``facts`` (what is read of this installation), ``decide`` (rows and facts make decisions, and set what is to be set),
``show`` (stderr, table, JSON, shell lines).
Nothing here imports torch.
"""

from __future__ import annotations

from hf_rocm_tune.machine.decide import (
    DECISIONS,
    MARK_SET,
    Decision,
    apply,
    covers,
    evaluate,
    known_facts,
    remember,
    too_late,
)
from hf_rocm_tune.machine.facts import MachineFacts, read_facts
from hf_rocm_tune.machine.links import issue_link, links_of
from hf_rocm_tune.machine.policy import POLICY
from hf_rocm_tune.machine.rules import Action
from hf_rocm_tune.machine.show import announce, explain, exports, to_json

__all__ = [
    "DECISIONS",
    "MARK_SET",
    "POLICY",
    "Action",
    "Decision",
    "MachineFacts",
    "announce",
    "apply",
    "covers",
    "evaluate",
    "explain",
    "exports",
    "issue_link",
    "known_facts",
    "links_of",
    "read_facts",
    "remember",
    "to_json",
    "too_late",
]
