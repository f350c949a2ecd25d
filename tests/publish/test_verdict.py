"""The verdict counts every check that found something: the table of counters is walked, and so is a real report."""

from __future__ import annotations

from typing import Any

import pytest

from hf_rocm_tune.counters import SECTIONS
from hf_rocm_tune.publish import page
from hf_rocm_tune.publish import verdict as verdicts
from hf_rocm_tune.transfer import TransferReport
from tests.publish.run_files import report, run

CHECKS = [name for name, section in SECTIONS.items() if section.is_check]


def counted(name: str, **numbers: int) -> dict[str, Any]:
    """A clean report of which one section has these counters, as the engine writes it."""
    counters = TransferReport()
    counters.add(name, **numbers)
    made = counters.to_dict()
    return report(**{each: made[each] for each in SECTIONS if each in made} | {"verify": "full"})


def test_the_engine_counts_what_the_table_says() -> None:
    made = TransferReport().to_dict()
    numbers = {name: {key for key in made[name] if not key.endswith(("seconds", "per_s"))} for name in SECTIONS}
    for name, section in SECTIONS.items():
        assert {key for key in section.counters if not key.endswith("seconds")} <= numbers[name], name
        if section.is_check:
            assert {section.wrong, *section.done} <= {*section.counters}, name
    wrong = {(name, key) for name, keys in numbers.items() for key in keys if key in ("mismatches", "disagreements")}
    assert wrong == {(name, section.wrong) for name, section in SECTIONS.items() if section.is_check}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("times", [1, 85])
def test_whatever_was_wrong_and_recovered_is_in_verdict_card_and_page(name: str, times: int) -> None:
    section = SECTIONS[name]
    recovers = {"recovered": times} if "recovered" in section.counters else {}
    found = counted(name, **{section.wrong: times}, **recovers)
    verdict = verdicts.judge(found, finished=True)
    assert verdict.level == "note" and "none of them was wrong" not in verdict.headline
    assert ("once" if times == 1 else f"{times} times") in verdict.headline
    (row,) = [row for row in verdicts.counted(found) if row[0] == section.title]
    assert row[2] == str(times)
    assert section.title in page.build({"run": run(report=found)})
    if recovers:
        lost = counted(name, **{section.wrong: times, "recovered": times - 1})
        assert verdicts.judge(lost, finished=True).level == "bad"


def test_a_clean_report_of_the_engine_is_good() -> None:
    verdict = verdicts.judge(counted("weights", tensors=3), finished=True)
    assert verdict.level == "good" and "none of them was wrong" in verdict.headline


def test_an_incident_that_no_counter_has_is_not_good() -> None:
    found = report(incidents=[{"step": 1, "stage": "elsewhere", "outcome": "recovered"}])
    assert verdicts.judge(found, finished=True).level == "note"


def test_results_that_differ_from_run_to_run_are_in_the_verdict() -> None:
    found = report(arithmetic={"deterministic": False, "replay_bound": 0.004})
    verdict = verdicts.judge(found, finished=True)
    assert verdict.level == "note" and any("different gradients" in note and "0.004" in note for note in verdict.notes)
    assert verdicts.judge(report(arithmetic={"deterministic": True}), finished=True).level == "good"


def test_a_layer_that_the_host_computes_otherwise_is_a_remark() -> None:
    row = {"layer": "model.layers.0", "differs_in": ["its output"]}
    verdict = verdicts.judge(report(arithmetic={"host_layers": [row]}), finished=True)
    assert verdict.level == "note" and any("model.layers.0" in note for note in verdict.notes)
    right = report(arithmetic={"host_layers": [{**row, "differs_in": []}]})
    assert verdicts.judge(right, finished=True).level == "good"


def test_what_is_not_covered_follows_what_was_checked() -> None:
    checked = report(arithmetic={"products": 400, "checked": 40, "replays": 3, "refusal": None})
    shown = page.build({"run": run(report=checked)})
    assert "40 checked, 3 replays" in shown and "between two samples of products" in shown
    off = page.build({"run": run(report=report(arithmetic={"refusal": "--check_arithmetic off"}))})
    assert "arithmetic on the card (it was not checked: --check_arithmetic off)" in off


@pytest.mark.parametrize("last", [6, 99, 1_000, 123_456, 20_000_000])
def test_no_label_of_a_curve_is_cut(last: int) -> None:
    rows = [{"step": step, "loss": 1.0} for step in range(0, last + 1, max(last // 6, 1))]
    panel = page.loss_panel(run(rows=rows))
    assert panel is not None
    drawn = page._drawing(panel)
    width = drawn["size"][0]
    for x, label, anchor in drawn["steps"]:
        right = x + (len(label) * 6.7 / 2 if anchor == "middle" else 0)
        assert right <= width, label


def test_bytes_that_crossed_unverified_are_told() -> None:
    row = {"origin": "a sampler", "bytes": 3_000_000_000, "reason": "its own copy"}
    link = {"crossed_bytes": 5_000_000_000, "verified_bytes": 2_000_000_000, "unverified": [row]}
    found = report(coverage={**report()["coverage"], "crossed": link})
    notes = verdicts.judge(found, finished=True).notes
    assert "3.0 GB crossed between host and card unverified: a sampler." in notes
    shown = page.build({"run": run(report=found)})
    assert "5.0 GB, of which 2.0 GB verified" in shown and "3.0 GB of a sampler: its own copy" in shown


def test_names_of_files_are_no_json() -> None:
    shown = page.build({"run": run(report=report(weights={**report()["weights"], "not_attested": ["a.st", "b.st"]}))})
    assert "2 without a recorded digest (a.st, b.st)" in shown
