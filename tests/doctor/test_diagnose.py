"""Checks are run in order, none of them stops another, and what was not run is said with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_rocm_tune.doctor.diagnose import NOTHING_THERE, all_checks, diagnose, in_order
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, all_rows, from_row
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.machine.sysfs import Reading
from tests.machine.trees import XT, Built, Slot
from tests.machines.case import cpu_stack, device, stack


def evidence(
    cards: int = 1, *, gpu: bool = True, recorded: bool = False, environ: dict[str, str] | None = None
) -> Evidence:
    built = Built("a machine")
    for _ in range(cards):
        built.card(XT, slot=Slot(width=8))
    devices = [device(f"0000:{3 + 3 * index:02x}:00.0", index=index) for index in range(cards)]
    software = stack(devices=devices) if gpu else cpu_stack()
    return Evidence(
        machine=survey(built.tree()), software=Software.from_dict(software), environ=environ or {}, recorded=recorded
    )


def check(name: str, *finds: Finding, group: str = "links", **more: object) -> Check:
    return Check(name=name, group=group, about=name, run=lambda evidence: finds, **more)  # type: ignore[arg-type]


def finding(name: str, row: str = "kfd_missing") -> Finding:
    return from_row(row, check=name, address="0000:03:00.0")


def crashing(error: BaseException) -> Check:
    def run(evidence: Evidence) -> Iterator[Finding]:
        yield finding("crashing")
        raise error

    return Check(name="crashing", group="links", about="crashes", run=run)


@pytest.mark.parametrize(
    "error", [ValueError("odd\nthing"), KeyError("x"), AssertionError(), RecursionError(), OSError(5, "I/O")]
)
def test_a_check_that_crashes_is_reported_and_stops_nothing(error: BaseException) -> None:
    done = diagnose(evidence(), [check("before", finding("before")), crashing(error), check("after", finding("after"))])
    # What it had found by then is kept.
    assert [one.check for one in done.findings] == ["before", "crashing", "crashing", "after"]
    crashed = done.findings[2]
    assert (crashed.row, crashed.status) == ("check_crashed", "warn")
    assert type(error).__name__ in crashed.text
    assert "\n" not in crashed.text


def test_ctrl_c_is_no_crash_of_a_check() -> None:
    with pytest.raises(KeyboardInterrupt):
        diagnose(evidence(), [crashing(KeyboardInterrupt())])


def test_the_order_is_that_of_the_groups() -> None:
    places = list(GROUPS)
    order = [places.index(one.group) for one in all_checks()]
    assert order == sorted(order)
    assert all_checks()[-1].name == "link_errors_after"
    mixed = [check("c", group="compute"), check("a", group="access"), check("b", group="access")]
    assert [one.name for one in in_order(mixed)] == ["a", "b", "c"]


def test_a_check_that_is_not_run_says_why() -> None:
    measured = check("m", finding("m"), measured=True)
    long = check("l", finding("l"), measured=True, full=True, seconds=240)

    def why(known: Evidence, one: Check, **more: bool) -> str:
        (made,) = diagnose(known, [one], **more).findings
        return made.text if made.status == "skipped" else made.status

    assert why(evidence(), measured) == "fail"
    assert "recording" in why(evidence(recorded=True), measured)
    assert "torch sees no accelerator" in why(evidence(gpu=False), measured)
    assert "4 minutes; --full" in why(evidence(), long)
    assert why(evidence(), long, full=True) == "fail"
    assert why(evidence(), check("e")) == NOTHING_THERE


def test_after_two_hangs_nothing_more_is_measured() -> None:
    def hanging(name: str, row: str = "measurement_hung") -> Check:
        values = {"source": "0", "destination": "1"} if row == "pair_hung" else {"what": name}
        return check(name, from_row(row, how="had not ended", **values), measured=True)

    def statuses(*checks: Check) -> list[str]:
        return [one.status for one in diagnose(evidence(2), checks).findings]

    fine = check("fine", finding("fine"), measured=True)
    read, after = check("read", finding("read")), replace(fine, name="after", group="after")
    assert statuses(hanging("a"), fine) == ["fail", "fail"]
    assert statuses(hanging("a"), hanging("a"), fine) == ["fail", "fail", "fail"], "two cards, one check"
    done = diagnose(evidence(2), [hanging("a"), hanging("b", "pair_hung"), fine, read, after])
    assert [one.status for one in done.findings][:5] == ["fail", "fail", "skipped", "fail", "fail"]
    assert done.findings[2].text == "a and b did not return; --only fine measures it anyway"


def test_between_cards_nothing_is_measured_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evidence(2)
    one = replace(whole, software=replace(whole.software, devices=Reading(value=whole.devices[:1])))  # type: ignore[type-var]
    named = [measured for measured in all_checks() if measured.needs_cards > 1 and measured.measured]
    assert len(named) > 2
    asked: list[str] = []
    run = "hf_rocm_tune.doctor.diagnose.run_measured"
    monkeypatch.setattr(run, lambda measured, *_, **__: asked.append(measured.name) or [])
    for made in diagnose(one, named, full=True).findings:
        assert (made.status, made.text) == ("skipped", "torch sees 1 of 2 cards")
    assert asked == []
    diagnose(whole, named, full=True)
    assert asked == [measured.name for measured in named]


def test_what_needs_two_cards_does_not_appear_on_one() -> None:
    pairs = check("pairs", finding("pairs"), measured=True, needs_cards=2)
    about_two = check("both", from_row("links_unequal", widths="x"))
    assert diagnose(evidence(1), [pairs]).findings == ()
    assert [one.status for one in diagnose(evidence(1), [about_two]).findings] == ["skipped"]
    assert [one.check for one in diagnose(evidence(2), [pairs, about_two]).findings] == ["pairs", "both"]


def test_an_integrated_gpu_is_no_second_card() -> None:
    beside = Built("beside").card(XT).igpu()
    devices = [device(), device("0000:04:00.0", index=1, arch="gfx1036", gib=0.5)]
    software = Software.from_dict(stack(devices=devices))
    known = Evidence(machine=survey(beside.tree()), software=software, environ={})
    assert known.card_count == 1
    two_of_another_vendor = Evidence(
        machine=survey(Built("cuda").nvidia().nvidia().tree()),
        software=Software.from_dict(
            stack(hip=None, cuda="13.0", devices=[device("0000:01:00.0"), device("0000:02:00.0", index=1)])
        ),
        environ={},
    )
    assert two_of_another_vendor.card_count == 2


def test_what_was_found_is_told_to_the_policy_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(all_rows()["links_unequal"], environ=("peer_copy_failed",))
    monkeypatch.setitem(all_rows(), "links_unequal", row)
    pair = check("pairs", from_row("links_unequal", widths="x"))
    told = [one for one in diagnose(evidence(2), [pair]).findings if one.check == "variables"]
    assert [(one.title, one.status) for one in told] == [("NCCL_P2P_DISABLE=1", "info")]
    assert told[0].cure == "`export NCCL_P2P_DISABLE=1`; a run does not set it"
    # The user's own value stands, and that is said; nothing is said on one card, where the row does not appear.
    kept = diagnose(evidence(2, environ={"NCCL_P2P_DISABLE": "0"}), [pair]).findings
    assert "the user's value is kept" in kept[-1].text
    assert not [one for one in diagnose(evidence(1), [pair]).findings if one.check == "variables"]
