"""The verdict on a run is never better than what its report proves."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.publish.history import counted, coverage, incident, judge
from tests.publish.card_runs import incident as transfer_incident
from tests.publish.card_runs import report, stage

WRONG = stage(mismatches=2, recovered=1)


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "good", "100 % of the bytes on the device were verified, and none of them was wrong."),
        ({"batches": stage(mismatches=1, recovered=1)}, "good", "Something was wrong once, was noticed"),
        ({"batches": WRONG}, "bad", "could not be recovered: batches: 1 of 2 mismatches"),
        ({"gradients": WRONG}, "bad", "gradients: 1 of 2"),
        ({"incidents": [transfer_incident(outcome="stopped")]}, "bad", "batches input_ids at step 2"),
        ({"coverage": {"verified_bytes": 999_999, "device_bytes": 1_000_000}}, "note", "99.9999 %"),
        ({"coverage": {"verified_bytes": 10**12 - 1, "device_bytes": 10**12}}, "note", "99.9999 %"),
        ({"coverage": {"verified_bytes": 0, "device_bytes": 0}}, "unknown", "not verified"),
        ({"coverage": {}}, "unknown", "not verified"),
        ({"verify": "sample"}, "note", "100 %"),
        ({"verify": "off"}, "unknown", "not verified"),
        ({"verify": None}, "note", "100 %"),
        ({"incidents": None}, "unknown", "not of the expected form"),
        ({"weights": "none"}, "unknown", "not of the expected form"),
        ({"casts": {}}, "unknown", "not of the expected form"),
        ({"incidents": [5]}, "unknown", "not of the expected form"),
    ],
)
def test_of_a_finished_run(changed: dict[str, Any], level: str, words: str) -> None:
    found = judge(report(**changed), finished=True)
    assert (found.level, words in found.headline) == (level, True), found


def test_a_run_that_is_not_finished_or_was_changed_is_not_good() -> None:
    assert judge(report(), finished=False).level == "note"
    assert "has not come to its end" in judge(report(), finished=False).notes[0]
    damaged = judge(report(), finished=True, damaged=["a is changed (x)", "b is missing (y)"])
    assert (damaged.level, "a is changed (x) and 1 more" in damaged.headline) == ("bad", True)
    assert judge({}, finished=True).level == "unknown"


def test_what_was_asked_to_break_is_always_told() -> None:
    asked = report(
        fault_injection={"kind": "flip"}, step_fault_injection={"kind": "nan"}, survival={"crash_injection": "step=1"}
    )
    assert len([note for note in judge(asked, finished=True).notes if "on request" in note]) == 3


def test_coverage_is_never_rounded_up() -> None:
    assert coverage(report(coverage={"verified_bytes": 2**60 - 1, "device_bytes": 2**60})) == 99.9999
    assert coverage(report(coverage={"verified_bytes": 3, "device_bytes": 3})) == 100
    assert coverage(report(coverage={"verified_bytes": "3", "device_bytes": 3})) is None


def test_every_check_that_looked_or_found_is_counted() -> None:
    rows = counted(report(replicas={"checks": 0, "mismatches": 1}, batches=stage(verified_bytes=1000)))
    assert [row.what for row in rows] == [
        "model weights",
        "batches",
        "frozen weights in memory",
        "equal weights on all ranks",
        "files read back",
    ]
    assert rows[1].amount == "10 tensors, 4 kB (1 kB verified)"
    assert rows[3].mismatches == 1 and rows[3].recovered is None
    assert counted({}) == []


def test_incidents_of_every_kind_have_the_same_columns() -> None:
    shortage = {"kind": "out_of_memory", "step": 3, "said": "no room", "rows": [1, 2], "outcome": "recovered"}
    names = [list(incident(row)) for row in (transfer_incident(), shortage, "text", None, [1])]
    assert all(each == names[0] for each in names)
    assert incident(shortage)["details"] == "said: no room; rows: 1, 2"
    assert incident(transfer_incident())["where"] == "1,024 bytes from byte 64"
    assert incident(transfer_incident(step=None))["step"] == ""
