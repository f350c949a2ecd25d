"""Two supervisors of one job on two machines: each start stands in the journal once, whichever of them leads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rocm_tune.supervisor.ledger import Ledger
from hf_rocm_tune.training.journal import FILE_NAME
from hf_rocm_tune.training.supervised import Begun


def begun(output: Path, *, leads: bool) -> Begun:
    return Begun(run_id="run", output_dir=str(output), resumed_from=None, attempt=1, leads=leads)


@pytest.mark.parametrize("leaders", [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 0)])
def test_every_start_is_entered_once(tmp_path: Path, leaders: tuple[int, ...]) -> None:
    ledgers = [Ledger(), Ledger()]
    for start, leader in enumerate(leaders, 1):
        for number, ledger in enumerate(ledgers):
            ledger.belongs_to(begun(tmp_path, leads=number == leader))
            ledger.add("start", start=start)
        for ledger in ledgers:
            ledger.add("end", code=-9, start=start)
    entries = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [(each["event"], each["start"]) for each in entries] == [
        (event, start) for start in range(1, len(leaders) + 1) for event in ("start", "end")
    ]


def test_a_start_that_never_began_is_entered_by_who_leads_the_next(tmp_path: Path) -> None:
    leader, other = ledgers = [Ledger(), Ledger()]
    for ledger in ledgers:
        ledger.add("end", code=1, start=1)
    assert not (tmp_path / FILE_NAME).exists()
    other.belongs_to(begun(tmp_path, leads=False))
    leader.belongs_to(begun(tmp_path, leads=True))
    (entry,) = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert (entry["event"], entry["start"], entry["run_id"]) == ("end", 1, "run")
