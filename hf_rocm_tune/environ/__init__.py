"""Environment variables: set, keep or warn, each with its reason and source, before torch is imported.

Reading order: ``rules`` (what a row is), ``policy`` (all rows, from ``rows_*``), ``links`` (their addresses),
``facts`` (what is read of this installation), ``decide`` (rows and facts make decisions, and set what is to be set),
``show`` (stderr, table, JSON, shell lines).
Nothing here imports torch.
"""

from __future__ import annotations

from hf_rocm_tune.environ.decide import DECISIONS, Decision, apply, covers, evaluate, known_facts, remember, too_late
from hf_rocm_tune.environ.facts import MachineFacts, read_facts
from hf_rocm_tune.environ.show import announce, explain, exports, to_json

__all__ = [
    "DECISIONS",
    "Decision",
    "MachineFacts",
    "announce",
    "apply",
    "covers",
    "evaluate",
    "explain",
    "exports",
    "known_facts",
    "read_facts",
    "remember",
    "to_json",
    "too_late",
]
