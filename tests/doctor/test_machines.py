"""Whole machines, replayed: each gives exactly its findings, and nonsense in every file is never an exception."""

from __future__ import annotations

import base64
import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.doctor import capture
from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.diagnose import Diagnosis, diagnose
from hf_rocm_tune.doctor.markdown import render
from hf_rocm_tune.doctor.outcome import Report
from hf_rocm_tune.doctor.registry import all_checks
from hf_rocm_tune.doctor.rows import KNOWLEDGE
from hf_rocm_tune.doctor.table import Table
from tests.doctor.machines import MACHINES
from tests.doctor.stacks import device, stack
from tests.hardware.parts import RAPHAEL, XT, XTX, Slot
from tests.hardware.trees import Built

CHECKS: list[Check] = all_checks()


def examine(recording: dict[str, Any], directory: Path) -> Diagnosis:
    """The diagnosis of a recording, by way of a file as a user would give it."""
    file = directory / "machine.json"
    file.write_text(json.dumps(recording), encoding="utf-8")
    return diagnose(capture.read(file)[0], CHECKS)


def told(diagnosis: Diagnosis) -> dict[str, int]:
    """Rows that say more than that all is well; variables with their status."""
    grave = [one for one in diagnosis.findings if one.status in ("info", "warn", "fail")]
    return dict(Counter(f"{one.row}={one.status}" if one.row.startswith("environ:") else one.row for one in grave))


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gives_exactly_its_findings(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    done = examine(machine.recording, tmp_path)
    assert told(done) == machine.finds
    assert {one.check for one in done.findings if one.status == "unknown"} == machine.unknown
    assert done.exit_code == machine.code
    measured = {check.name for check in CHECKS if check.measured and check.needs_cards < 2}
    assert measured <= {one.check for one in done.findings if one.status == "skipped"}


def test_every_row_about_what_is_read_is_met_on_some_machine(tmp_path: Path) -> None:
    met = {one.row for name in MACHINES for one in examine(MACHINES[name].recording, tmp_path).findings}
    files = ("access", "kernel", "pcie", "host", "software", "variables")
    known = {name for file in files for name in tomllib.loads((KNOWLEDGE / f"{file}.toml").read_text("utf-8"))}
    of_other_tests = {
        *("check_crashed", "aer_rising", "aer_corrected_rising", "aer_still", "topology_unread"),
        *("card_given_away", "no_card", "atomics_missing", "atomics_missing_pair", "igpu_visible"),  # tests/machines
    }
    assert known - met == of_other_tests


def test_on_one_card_nothing_is_said_about_pairs_and_the_iommu(tmp_path: Path) -> None:
    for name in ("healthy", "iommu_translating", "no_iommu", "kernel_28", "igpu"):
        done = examine(MACHINES[name].recording, tmp_path)
        assert not [one for one in done.findings if one.needs_cards > 1 or one.check in ("iommu", "peer_support")]
        words = "\n".join(shown(done)).lower()
        assert "iommu" not in words
        assert "pcie_p2p" not in words


def test_with_two_cards_the_iommu_is_a_fact_and_no_order(tmp_path: Path) -> None:
    for name, state in (
        ("two_cards", "translating"),
        ("two_cards_passthrough", "passthrough"),
        ("two_cards_no_iommu", "off"),
    ):
        (finding,) = (one for one in examine(MACHINES[name].recording, tmp_path).findings if one.check == "iommu")
        assert (finding.status, state in finding.title) == ("info", True)
        assert "contradictory" in finding.text
        assert finding.cure.startswith("only if the pair test fails")
        assert "must" not in finding.text + finding.cure


def test_the_right_line_is_printed_for_an_integrated_gpu(tmp_path: Path) -> None:
    cards = Built("the card is not the first").igpu(RAPHAEL).card(XT).having(software=stack(devices=[device(bus=4)]))
    (finding,) = (one for one in examine(cards.recording(), tmp_path).findings if one.check == "integrated")
    assert "`export HIP_VISIBLE_DEVICES=1`" in finding.cure
    both = Built("two cards around it").card(XT).igpu(RAPHAEL).card(XTX).having(software=stack())
    (finding,) = (one for one in examine(both.recording(), tmp_path).findings if one.check == "integrated")
    # The larger card first, as training would take them.
    assert "`export HIP_VISIBLE_DEVICES=2,0`" in finding.cure


def shown(diagnosis: Diagnosis) -> Iterator[str]:
    """A diagnosis in all of its forms."""
    groups = {check.name: check.group for check in CHECKS}
    report = Report(diagnosis=diagnosis, groups=groups, about="", source="", fault="", seconds=0.0)
    yield from (Table().render(report), render(report), json.dumps(report.to_dict()))


def spoilt(keep: float, seed: int) -> dict[str, Any]:
    """A machine with one of everything, of which all but a share is nonsense."""
    chance = random.Random(seed)
    built = Built("invented: nonsense in its files").card(slot=Slot(width=4, chipset=True)).card(XTX).igpu(RAPHAEL)
    recording = built.container("docker").having(software=stack(), environ={"HIP_VISIBLE_DEVICES": "x"}).recording()
    for section in ("files", "links", "nodes", "binary"):
        for path in list(recording[section]):
            if chance.random() < keep:
                continue
            del recording[section][path]
            kind = chance.choice(("text", "bytes", "error", "gone"))
            if kind == "text":
                recording["files"][path] = chance.choice(NONSENSE)
            elif kind == "bytes":
                recording["binary"][path] = base64.b64encode(chance.randbytes(chance.randrange(300))).decode()
            elif kind == "error":
                recording["errors"][path] = chance.choice(("EACCES", "EIO", "ENODEV", "EINVAL", "ELOOP"))
    return recording


NONSENSE = ("", "\n", "-1", "0x", "9" * 40, "\x1b[2J\x07", "x" * 3000, "a b c\n" * 200, "N/A", "\u0661", "0 " * 9, "-0")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_nonsense_in_the_files_is_never_an_exception(keep: float, tmp_path: Path) -> None:
    for seed in range(40):
        done = examine(spoilt(keep, seed), tmp_path)
        assert not [one for one in done.findings if one.row == "check_crashed"], seed
        for text in shown(done):
            assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("content", [*NONSENSE, None, b"\0\xff"])
def test_one_kind_of_nonsense_everywhere(content: str | bytes | None, tmp_path: Path) -> None:
    recording = spoilt(1.0, 0)
    paths = [*recording["files"], *recording["binary"], *recording["links"], *recording["nodes"]]
    recording |= {"files": {}, "binary": {}, "links": {}, "nodes": {}}
    if content is None:
        recording["errors"] = dict.fromkeys(paths, "EACCES")
    elif isinstance(content, bytes):
        recording["binary"] = dict.fromkeys(paths, base64.b64encode(content).decode())
    else:
        recording["files"] = dict.fromkeys(paths, content)
    done = examine(recording, tmp_path)
    assert not [one for one in done.findings if one.row == "check_crashed"]
    assert done.exit_code in (0, 1)
    assert any(one.status == "unknown" for one in done.findings)
