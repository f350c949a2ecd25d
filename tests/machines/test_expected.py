"""Each machine gives exactly its findings, through the real command."""

from __future__ import annotations

import pytest

from tests.machines.catalogue import MACHINES
from tests.machines.replay import Replay, statuses


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gives_exactly_its_findings(name: str, replays: dict[str, Replay]) -> None:
    case, done = MACHINES[name], replays[name]
    assert statuses(done.findings, named=case.expected) == case.expected
    assert done.codes == {"table": case.code, "json": case.code, "markdown": case.code}
    assert {one["check"] for one in done.findings if one["status"] == "unknown"} == set(case.unknown)
    assert set(case.fine) <= {one["row"] for one in done.findings if one["status"] == "ok"}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_told_what_its_owner_needs(name: str, replays: dict[str, Replay]) -> None:
    case, done = MACHINES[name], replays[name]
    assert [text for text in case.says if text not in done.words] == []
    everything = " ".join(" ".join(done.text.values()).split())
    assert [text for text in case.never if text in everything] == []


def test_there_are_enough_machines_and_each_names_its_source() -> None:
    assert len(MACHINES) >= 22
    sources = {name: case.recording.get("source", "") for name, case in MACHINES.items() if name != "nothing_recorded"}
    assert [name for name, source in sources.items() if len(source) < 15] == []
    assert len(set(sources.values())) > 60
