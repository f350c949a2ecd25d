"""Counters add up, over stages and over ranks."""

from __future__ import annotations

import json

import pytest

from hf_rocm_tune.transfer import TransferReport, gb_per_s


def test_ranks_add_up_and_incidents_name_theirs() -> None:
    ranks = []
    for number in range(2):
        report = TransferReport()
        report.add(
            "weights", tensors=2, bytes=2_000_000_000, verified_bytes=5, transfer_seconds=0.5, verify_seconds=0.5
        )
        report.count("gradients", buckets=3, mismatches=number)
        report.watched("frozen", passes=1, tensors=7, new_mismatches=0)
        report.watched("frozen", passes=2, tensors=7, new_mismatches=1)
        report.incident({"step": number, "kind": "zeros"})
        ranks.append(json.loads(json.dumps(report.to_dict())))
    merged = TransferReport.merge(ranks)
    assert merged["weights"] == {
        "tensors": 4, "bytes": 4_000_000_000, "verified_bytes": 10, "mismatches": 0, "recovered": 0,
        "transfer_seconds": 1.0, "verify_seconds": 1.0, "seconds": 2.0, "gb_per_s": 2.0,
    }  # fmt: skip
    assert merged["gradients"] == {"buckets": 6, "mismatches": 1, "recovered": 0}
    assert merged["frozen"] == {"passes": 4, "tensors": 14, "mismatches": 2}
    assert [row["rank"] for row in merged["incidents"]] == [0, 1]
    assert TransferReport.merge(ranks[:1]) == ranks[0]


def test_an_unknown_counter_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        TransferReport().add("weights", tensor=1)


def test_gb_per_s_is_decimal() -> None:
    assert gb_per_s(3e9, 2) == 1.5
    assert gb_per_s(1, 0) == 0
