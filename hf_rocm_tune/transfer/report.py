"""Counters of transfers, verifications and faults: the numbers in ``transfer_report.json``."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hf_rocm_tune.counters import SECTIONS, SENT
from hf_rocm_tune.redaction import redact_json

STAGES = ("weights", "batches", "adapter", "optimizer", "buckets", "streamed", "copies")
"""What is transferred: model weights, training and evaluation batches, adapter weights, optimizer state, buckets of
gradients that are averaged on the host (both directions), layers that are streamed while they compute, and other copies
that a program or a library makes by itself."""
BETWEEN_CARDS = "activations"
"""Transfers between the cards of a split model: activations, their gradients, masks; each direction counts."""
_COUNTED = (*STAGES, BETWEEN_CARDS)
_CROSSINGS = ("to_device_bytes", "to_host_bytes", "numbers_read", "numbers_bytes")
_crossed = dict.fromkeys(_CROSSINGS, 0)
_crossed_lock = threading.Lock()


def count_crossing(*, to_device_bytes: int = 0, to_host_bytes: int = 0) -> None:
    """Count bytes that this process sends over the link, as the driver does: with gaps, retries and digests."""
    with _crossed_lock:
        _crossed["to_device_bytes"] += to_device_bytes
        _crossed["to_host_bytes"] += to_host_bytes


def count_number(nbytes: int) -> None:
    """Count a number that was read from a card by ``item`` or what is built on it, unverified."""
    with _crossed_lock:
        _crossed["numbers_read"] += 1
        _crossed["numbers_bytes"] += nbytes


def own_origin(stage: str) -> str:
    """Who asked for a copy that this package makes itself."""
    return f"hf_rocm_tune ({stage})"


def crossings() -> dict[str, int]:
    """All that this process has sent over the link so far, as a driver would count it."""
    with _crossed_lock:
        return dict(_crossed)


def gb_per_s(nbytes: float, seconds: float) -> float:
    """Rate in 10^9 bytes per second; 0 for no time."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def share_words(part: int, whole: int) -> str:
    """A share in per cent with four digits; 100 only for all of it."""
    per_cent = 100 * part / max(whole, 1)
    highest = 100.0 if part >= whole else 99.99
    return f"{min(per_cent, highest):.4g} %"


class TransferReport:
    """Thread-safe counters of one process.

    Seconds are those spent by the calling threads, so concurrent threads add up. ``verify_seconds``: digesting and
    packing the source, and waiting for the verdict; ``transfer_seconds``: the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, float]] = {
            name: dict.fromkeys(section.counters, 0) for name, section in SECTIONS.items()
        }
        self._incidents: list[dict[str, Any]] = []
        self._rebaselined: list[dict[str, Any]] = []
        self._origins: dict[tuple[str, str, str], list[int]] = {}

    def crossed(self, direction: str, origin: str, nbytes: int, *, verified: bool, why: str = "") -> None:
        """Count one copy that somebody asked for: ``to_device``, ``to_host`` or ``between_cards``.

        ``origin``: the file and function that asked for it; ``why`` it was not verified.
        """
        key = (direction, origin, why)
        with self._lock:
            row = self._origins.setdefault(key, [0, 0, 0])
            row[0] += 1
            row[1] += nbytes
            if verified:
                row[2] += nbytes

    def add(self, stage: str, **increments: float) -> None:
        """Add to the counters of a stage (tensors, bytes, verified_bytes, mismatches, recovered, ``*_seconds``), or of
        a section such as ``casts``, ``gradients``, ``replicas`` or ``files`` read back."""
        with self._lock:
            counters = self._counters[stage]
            for key, value in increments.items():
                assert key in counters, f"no counter {key}"
                counters[key] += value

    count = add

    def watched(self, section: str, *, new_mismatches: int, **state: int) -> None:
        """Set the state of the sentinel over ``frozen`` or ``trained`` tensors, and add new mismatches."""
        with self._lock:
            counters = self._counters[section]
            counters.update(state, mismatches=counters["mismatches"] + new_mismatches)

    def rebaselined(self, tensor: str, reason: str, step: int | None = None) -> None:
        """Record that a frozen tensor was replaced or rewritten on purpose, and got a new baseline."""
        with self._lock:
            self._rebaselined.append({"step": step, "tensor": tensor, "reason": reason})

    def incident(self, row: Mapping[str, Any]) -> None:
        """Add one incident: a flat dict that JSON can hold."""
        with self._lock:
            self._incidents.append(dict(row))

    def close_incidents(self, stages: Collection[str], outcome: str) -> None:
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
            rebaselined = [dict(row) for row in self._rebaselined]
            incidents = [dict(row) for row in self._incidents]
            return _assemble(self._counters, _crossed, _origin_rows(self._origins), rebaselined, incidents)

    def __repr__(self) -> str:
        """One line: what was moved, and what was wrong."""
        with self._lock:
            sums = [int(sum(self._counters[stage][key] for stage in _COUNTED)) for key in SENT[:5]]
            incidents = f", {len(self._incidents)} incidents" if self._incidents else ""
        tensors, moved, verified, wrong, right = sums
        return (
            f"TransferReport({tensors:,} tensors, {verified:,} of {moved:,} bytes verified, {wrong} mismatches, "
            f"{right} recovered{incidents})"
        )

    def _repr_html_(self) -> str:
        """A table of the stages, for a notebook."""
        head = "".join(f"<th>{title}</th>" for title in ("", "tensors", "bytes", "verified", "wrong", "recovered"))
        rows = []
        with self._lock:
            for name in _COUNTED:
                counts = self._counters[name]
                if counts["tensors"]:
                    cells = "".join(f"<td>{int(counts[key]):,}</td>" for key in SENT[:5])
                    rows.append(f"<tr><th>{name}</th>{cells}</tr>")
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"

    @staticmethod
    def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Add up the results of `to_dict` of all ranks; with several ranks incidents get their rank."""
        reports = list(reports)
        counters = {}
        for name, section in SECTIONS.items():
            counters[name] = {key: sum(report[name][key] for report in reports) for key in section.counters}
        crossed = {key: sum(report["crossings"][key] for report in reports) for key in _CROSSINGS}
        origins: dict[tuple[str, str, str], list[int]] = {}
        for report in reports:
            for row in report["origins"]:
                sums = origins.setdefault((row["direction"], row["origin"], row["why"]), [0, 0, 0])
                for at, key in enumerate(_ORIGIN_SUMS):
                    sums[at] += row[key]
        rebaselined = _rows_of_ranks(reports, "rebaselined")
        incidents = _rows_of_ranks(reports, "incidents")
        return _assemble(counters, crossed, _origin_rows(origins), rebaselined, incidents)


_ORIGIN_SUMS = ("copies", "bytes", "verified_bytes")


def _rows_of_ranks(reports: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of a list in all reports; with several ranks they get their rank."""
    rows = []
    for rank, report in enumerate(reports):
        for row in report[name]:
            if len(reports) > 1:
                row = {**row, "rank": rank}
            rows.append(dict(row))
    return rows


def _origin_rows(origins: Mapping[tuple[str, str, str], list[int]]) -> list[dict[str, Any]]:
    """The copies by who asked for them, the largest first."""
    rows = []
    for (direction, origin, why), sums in origins.items():
        row = {"direction": direction, "origin": origin, "why": why}
        rows.append({**row, **dict(zip(_ORIGIN_SUMS, sums, strict=True))})
    return sorted(rows, key=lambda row: (-row["bytes"], row["direction"], row["origin"]))


def coverage_of(counters: Mapping[str, Any]) -> dict[str, Any]:
    """How much of what crossed between host and card was verified, of the result of `TransferReport.to_dict`.

    ``unverified``: what crossed and was not verified, by who asked for it; ``numbers_read``: by ``item``, unverified.
    """
    rows = counters["origins"]
    unverified = []
    for row in rows:
        if row["verified_bytes"] < row["bytes"]:
            unverified.append(
                {
                    "origin": row["origin"],
                    "direction": row["direction"],
                    "bytes": row["bytes"] - row["verified_bytes"],
                    "reason": row["why"] or "moved without verification, as --verify says",
                }
            )
    return {
        "verified_bytes": sum(row["verified_bytes"] for row in rows),
        "crossed_bytes": sum(row["bytes"] for row in rows),
        "unverified": unverified,
        "numbers_read": counters["crossings"]["numbers_read"],
    }


def to_json(content: Mapping[str, Any]) -> str:
    """A report as text: secrets and control characters are taken out."""
    return json.dumps(redact_json(dict(content)), indent=2) + "\n"


def _assemble(
    counters: Mapping[str, Mapping[str, float]],
    crossed: Mapping[str, int],
    origins: list[dict[str, Any]],
    rebaselined: list[dict[str, Any]],
    incidents: list[dict[str, Any]],
) -> dict[str, Any]:
    result: dict[str, Any] = {name: dict(row) for name, row in counters.items()}
    for stage in _COUNTED:
        row = result[stage]
        seconds = row["transfer_seconds"] + row["verify_seconds"]
        row.update({key: round(row[key], 6) for key in row if key.endswith("seconds")})
        row.update(seconds=round(seconds, 6), gb_per_s=round(gb_per_s(row["bytes"], seconds), 4))
    lists = {"origins": origins, "rebaselined": rebaselined, "incidents": incidents}
    return {**result, "crossings": dict(crossed), **lists}
