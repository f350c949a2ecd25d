"""The counters of a run: what each section of `transfer_report.json` counts, and which of its numbers say "wrong".

One table for those who count (`transfer.report`) and for those who judge and show what was counted (`publish`).
"""

from __future__ import annotations

from typing import NamedTuple

SENT = ("tensors", "bytes", "verified_bytes", "mismatches", "recovered", "transfer_seconds", "verify_seconds")
"""Counters of a stage, in which tensors are sent."""


class Section(NamedTuple):
    """One section of a report."""

    title: str  # for people; empty for a section that counts no checks
    counters: tuple[str, ...]
    done: tuple[str, ...] = ()  # counters of checks that were made
    wrong: str = "mismatches"  # counter of checks that found something wrong; empty for none
    needed: bool = False  # a report without it is no evidence

    @property
    def is_check(self) -> bool:
        return bool(self.title)


SECTIONS: dict[str, Section] = {
    "weights": Section("model weights", SENT, ("tensors",), needed=True),
    "batches": Section("batches", SENT, ("tensors",), needed=True),
    "adapter": Section("adapter weights", SENT, ("tensors",), needed=True),
    "optimizer": Section("optimizer state", SENT, ("tensors",), needed=True),
    "buckets": Section("gradients averaged through host memory", SENT, ("tensors",)),
    "streamed": Section("layers streamed while they compute", SENT, ("tensors",)),
    "copies": Section("copies that libraries or the program make", SENT, ("tensors",)),
    "activations": Section("activations between cards, or to host memory and back", SENT, ("tensors",)),
    "casts": Section("casts of weights", ("checked", "mismatches", "recovered"), ("checked",), needed=True),
    "gradients": Section("averaged gradients", ("buckets", "mismatches", "recovered"), ("buckets",), needed=True),
    "gathered": Section("weights gathered from ranks", ("checked", "mismatches"), ("checked",)),
    "frozen": Section("frozen weights in memory", ("passes", "tensors", "mismatches"), ("passes",)),
    "trained": Section("trained weights in memory", ("checks", "rewritten", "mismatches"), ("checks",)),
    "replicas": Section("equal weights on all ranks", ("checks", "mismatches"), ("checks",)),
    "files": Section("files read back", ("verified", "mismatches"), ("verified",)),
    "arithmetic": Section(
        "arithmetic: products with frozen weights, micro-batches computed twice, attention, choices of experts, "
        "layers on the host, "
        "clipping, updates",
        (
            *("products", "checked", "residuals", "cleared", "replays", "attention", "choices", "layers", "updates"),
            *("clipped", "norms", "disagreements", "recovered"),
        ),
        ("checked", "replays", "attention", "choices", "layers", "updates", "clipped", "norms"),
        wrong="disagreements",
    ),
    "memory": Section("", ("shortages", "recovered", "cache_given_back", "libraries_bytes"), wrong=""),
    "guard": Section("", ("skipped_steps", "warnings"), wrong=""),
    "step_faults": Section("", ("injected",), wrong=""),
}
"""Every section of counters of a report, by its name."""
