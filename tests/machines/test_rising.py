"""Error counters that rise while the doctor measures: one reading cannot show it, so the doctor reads twice.

The machine is a recording, read once before and once after; the command and its checks are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from hf_rocm_tune.doctor import command as doctor_command
from hf_rocm_tune.doctor import links
from hf_rocm_tune.doctor.findings import Evidence
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import Machine, survey
from tests.machine.trees import Built
from tests.machines.installs import stack
from tests.machines.replay import command


def counting(aer: Mapping[str, int]) -> Machine:
    return survey(Built("rocm-libraries#12344: the counters of a link, before and after").card(aer=aer).tree())


def examined(
    before: Mapping[str, int], after: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, str]]:
    """Exit code, and row to status, of the checks of the counters on a machine that counts in between."""
    evidence = Evidence(machine=counting(before), software=Software.from_dict(stack()), environ={})
    monkeypatch.setattr(doctor_command, "read_here", lambda: (evidence, {}))
    monkeypatch.setattr(links, "survey", lambda: counting(after))
    code, out, _ = command("--only", "link_errors", "link_errors_after", "--json")
    return code, {one["row"]: one["status"] for one in json.loads(out)["findings"]}


@pytest.mark.parametrize(
    ("before", "after", "code", "told"),
    [
        ({}, {}, 0, {"aer_clean": "ok", "aer_still": "ok"}),
        ({"correctable": 4}, {"correctable": 9}, 1, {"aer_corrected": "info", "aer_corrected_rising": "warn"}),
        ({"correctable": 4}, {"correctable": 4, "nonfatal": 1}, 2, {"aer_corrected": "info", "aer_rising": "fail"}),
        ({"nonfatal": 3}, {"nonfatal": 3}, 1, {"aer_errors": "warn", "aer_still": "ok"}),
        ({"correctable": 4}, {}, 0, {"aer_corrected": "info", "aer_still": "ok"}),  # set back: not risen
    ],
)
def test_what_rises_while_measuring_is_told_by_what_it_means(
    before: dict[str, int], after: dict[str, int], code: int, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examined(before, after, monkeypatch) == (code, told)


def test_a_card_that_is_gone_after_measuring_is_not_called_still(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = Evidence(machine=counting({"correctable": 5}), software=Software.from_dict(stack()), environ={})
    monkeypatch.setattr(doctor_command, "read_here", lambda: (evidence, {}))
    monkeypatch.setattr(links, "survey", lambda: survey(Built("gone").tree()))
    _, out, _ = command("--only", "link_errors_after", "--json")
    (told,) = json.loads(out)["findings"]
    assert told["status"] == "skipped"
