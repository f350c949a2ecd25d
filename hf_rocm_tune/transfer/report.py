"""Counters of transfers, verifications and faults: the numbers in ``transfer_report.json``."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

STAGES = ("weights", "batches", "adapter", "optimizer", "buckets", "streamed")
"""What is transferred: model weights, training and evaluation batches, adapter weights, optimizer state, buckets of
gradients that are averaged on the host (both directions), and layers that are streamed while they compute."""
BETWEEN_CARDS = "activations"
"""Transfers between the cards of a split model: activations, their gradients, masks; each direction counts."""
_COUNTED = (*STAGES, BETWEEN_CARDS)
_SUMMED: dict[str, tuple[str, ...]] = {
    "casts": ("checked", "mismatches", "recovered"),
    "gradients": ("buckets", "mismatches", "recovered"),
    "gathered": ("checked", "mismatches"),
    "frozen": ("passes", "tensors", "mismatches"),
    "trained": ("checks", "rewritten", "mismatches"),
    "replicas": ("checks", "mismatches"),
    "files": ("verified", "mismatches"),
    "memory": ("shortages", "recovered", "cache_given_back", "libraries_bytes"),
    "guard": ("skipped_steps", "warnings"),
    "arithmetic": ("products", "checked", "residuals", "cleared", "replays", "attention", "disagreements", "recovered"),
    "step_faults": ("injected",),
}
_STAGE_SUMS = (
    "tensors",
    "bytes",
    "verified_bytes",
    "mismatches",
    "recovered",
    "transfer_seconds",
    "verify_seconds",
)


_CROSSINGS = ("to_device_bytes", "to_host_bytes")
_crossed = dict.fromkeys(_CROSSINGS, 0)
_crossed_lock = threading.Lock()


def count_crossing(*, to_device_bytes: int = 0, to_host_bytes: int = 0) -> None:
    """Count all bytes that the engine sends over the link, with gaps, retries and results of digests."""
    with _crossed_lock:
        _crossed["to_device_bytes"] += to_device_bytes
        _crossed["to_host_bytes"] += to_host_bytes


def gb_per_s(nbytes: float, seconds: float) -> float:
    """Rate in 10^9 bytes per second; 0 for no time."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def share_words(part: int, whole: int) -> str:
    """A share in per cent with four digits; 100 only for all of it."""
    return f"{min(100 * part / max(whole, 1), 100.0 if part >= whole else 99.99):.4g} %"


class TransferReport:
    """Thread-safe counters of one process.

    Seconds are those spent by the calling threads, so concurrent threads add up. ``verify_seconds``: digesting and
    packing the source, and waiting for the verdict; ``transfer_seconds``: the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, dict[str, float]] = {stage: dict.fromkeys(_STAGE_SUMS, 0) for stage in _COUNTED}
        self._sections: dict[str, dict[str, int]] = {name: dict.fromkeys(keys, 0) for name, keys in _SUMMED.items()}
        self._incidents: list[dict[str, Any]] = []
        self._rebaselined: list[dict[str, Any]] = []

    def add(self, stage: str, **increments: float) -> None:
        """Add to the counters of a stage: tensors, bytes, verified_bytes, mismatches, recovered, ``*_seconds``."""
        with self._lock:
            counters = self._stages[stage]
            for key, value in increments.items():
                assert key in counters, f"no counter {key}"
                counters[key] += value

    def count(self, section: str, **increments: int) -> None:
        """Add to the counters of a section, such as ``casts``, ``gradients``, ``replicas`` or ``files`` read back."""
        with self._lock:
            counters = self._sections[section]
            for key, value in increments.items():
                assert key in counters, f"no counter {key}"
                counters[key] += value

    def watched(self, section: str, *, new_mismatches: int, **state: int) -> None:
        """Set the state of the sentinel over ``frozen`` or ``trained`` tensors, and add new mismatches."""
        with self._lock:
            counters = self._sections[section]
            counters.update(state, mismatches=counters["mismatches"] + new_mismatches)

    def rebaselined(self, tensor: str, reason: str, step: int | None = None) -> None:
        """Record that a frozen tensor was replaced or rewritten on purpose, and got a new baseline."""
        with self._lock:
            self._rebaselined.append({"step": step, "tensor": tensor, "reason": reason})

    def incident(self, row: Mapping[str, Any]) -> None:
        """Add one incident: a flat dict that JSON can hold."""
        with self._lock:
            self._incidents.append(dict(row))

    def settle_incidents(self, stages: Collection[str], outcome: str) -> None:
        """Give the ``stopped`` incidents of these stages a new outcome, after the run has continued."""
        with self._lock:
            for row in self._incidents:
                if row.get("stage") in stages and row.get("outcome") == "stopped":
                    row["outcome"] = outcome

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """A copy of the incidents so far."""
        with self._lock:
            return [dict(row) for row in self._incidents]

    def to_dict(self) -> dict[str, Any]:
        """The stages, sections and incidents, as in ``transfer_report.json``.

        ``crossings``: all bytes that the engine has sent in this process, as a driver would count them.
        """
        with self._lock, _crossed_lock:
            rows = ([dict(row) for row in each] for each in (self._rebaselined, self._incidents))
            return _assemble(self._stages, self._sections, _crossed, *rows)

    def __repr__(self) -> str:
        """One line: what was moved, and what was wrong."""
        with self._lock:
            sums = [int(sum(stage[key] for stage in self._stages.values())) for key in _STAGE_SUMS[:5]]
            found = f", {len(self._incidents)} incidents" if self._incidents else ""
        tensors, moved, verified, wrong, right = sums
        return (
            f"TransferReport({tensors:,} tensors, {verified:,} of {moved:,} bytes verified, {wrong} mismatches, "
            f"{right} recovered{found})"
        )

    def _repr_html_(self) -> str:
        """A table of the stages, for a notebook."""
        head = "".join(f"<th>{title}</th>" for title in ("", "tensors", "bytes", "verified", "wrong", "recovered"))
        with self._lock:
            rows = [
                f"<tr><th>{name}</th>" + "".join(f"<td>{int(row[key]):,}</td>" for key in _STAGE_SUMS[:5]) + "</tr>"
                for name, row in self._stages.items()
                if row["tensors"]
            ]
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"

    @staticmethod
    def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Add up the results of `to_dict` of all ranks; with several ranks incidents get their rank."""
        reports = list(reports)
        stages = {
            stage: {key: sum(report[stage][key] for report in reports) for key in _STAGE_SUMS} for stage in _COUNTED
        }
        sections = {
            name: {key: sum(report[name][key] for report in reports) for key in keys} for name, keys in _SUMMED.items()
        }
        crossed = {key: sum(report["crossings"][key] for report in reports) for key in _CROSSINGS}
        rank = [{"rank": number} if len(reports) > 1 else {} for number in range(len(reports))]
        lists = (
            [{**row, **rank[number]} for number, report in enumerate(reports) for row in report[name]]
            for name in ("rebaselined", "incidents")
        )
        return _assemble(stages, sections, crossed, *lists)


def _assemble(
    stages: Mapping[str, Mapping[str, float]],
    sections: Mapping[str, Mapping[str, int]],
    crossed: Mapping[str, int],
    rebaselined: list[dict[str, Any]],
    incidents: list[dict[str, Any]],
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for stage, counters in stages.items():
        seconds = counters["transfer_seconds"] + counters["verify_seconds"]
        rounded = {key: round(value, 6) if key.endswith("seconds") else value for key, value in counters.items()}
        rate = round(gb_per_s(counters["bytes"], seconds), 4)
        result[stage] = {**rounded, "seconds": round(seconds, 6), "gb_per_s": rate}
    result.update({name: dict(counters) for name, counters in sections.items()})
    result |= {"crossings": dict(crossed), "rebaselined": rebaselined, "incidents": incidents}
    return result
