"""What a run says of its machine before it starts: what is worth a line, and nothing that has been said already."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rocm_tune.job import announce as machine_findings
from hf_rocm_tune.machine.software import Software
from tests.machine.trees import RAPHAEL, Built
from tests.machines.case import cpu_stack, device, stack
from tests.machines.platforms import with_device


def looked(
    built: Built, software: Software, monkeypatch: pytest.MonkeyPatch, root: Path
) -> tuple[list[str], dict[str, str]]:
    """The lines that are said, and row to status of what goes into the report."""
    lines: list[str] = []
    monkeypatch.setattr(machine_findings, "survey", lambda: built.survey(root / built.source))
    monkeypatch.setattr(machine_findings, "read_software", lambda **_: software)
    found = machine_findings.check_machine(doctor=True, say=lines.append)
    return lines, {one["row"]: one["status"] for one in found if one["row"]}


def test_a_run_on_the_processor_is_not_told_again_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = with_device(Built("no card"), "0x144d", "0xa80a", "0x010802")
    lines, found = looked(built, cpu_stack(), monkeypatch, tmp_path)
    assert lines == []
    assert found["no_gpu"] == "warn", "the report has it"
    lines, found = looked(Built("its display").igpu(RAPHAEL), cpu_stack(), monkeypatch, tmp_path)
    assert lines == []
    assert found["no_card"] == "warn"
    seen = device("0000:01:00.0", name="AMD Radeon Graphics", arch="gfx1036", gib=15.4)
    lines, _ = looked(Built("its display, used").igpu(RAPHAEL), stack(devices=[seen]), monkeypatch, tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["warning", "failure"], "torch computes on that display"


def test_a_gpu_that_stays_idle_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, found = looked(Built("an idle card").nvidia(), cpu_stack(), monkeypatch, tmp_path)
    assert "no_amd_gpu" in found
    assert len(lines) == 1 and "NVIDIA 2684" in lines[0]
    lines, found = looked(Built("a card, and the wrong torch").card(), cpu_stack(), monkeypatch, tmp_path)
    assert found["torch_wrong_build"] == "fail"
    assert len(lines) == 1 and lines[0].startswith("failure: torch is not a ROCm build")


def test_a_line_is_one_line_with_cure_and_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, _ = looked(Built("errors").card(aer={"nonfatal": 3}), stack(), monkeypatch, tmp_path)
    (line,) = lines
    assert looked(Built("one card").card(), stack(), monkeypatch, tmp_path)[0] == []
    assert "\n" not in line and "reseat the card" in line and "rocm-libraries#12344" in line


@pytest.mark.parametrize("rank", ["1", "3"])
def test_other_ranks_are_silent(rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert looked(Built("errors").card(aer={"nonfatal": 3}), stack(), monkeypatch, tmp_path) == ([], {})
