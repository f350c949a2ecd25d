"""The findings of the doctor and the telemetry of the card stand in the report of a run, and never break one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import flags, report_of
from tests.machine.trees import XT, Built
from tests.two_ranks import environments

ROCM = {
    "torch": "2.13.0+rocm7.2",
    "hip": "7.2.26015",
    "archs": ["gfx1030", "gfx1100", "gfx1201"],
    "devices": [
        {
            "name": "Radeon RX 7900 XT",
            "arch": "gfx1100",
            "total_bytes": XT.vram_bytes,
            "pci_address": "0000:03:00.0",
        }
    ],
}
ADDRESS = "0000:03:00.0"
"""Of the first card of a machine that ``Built`` builds."""

Run = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def run(server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path) -> Run:
    """Runs one command on a pretended machine; its result and report."""

    def command(
        machine: Built | None = None,
        *more: str,
        env: dict[str, str] | None = None,
        software: dict[str, Any] | None = None,
        **pretended: Any,
    ) -> tuple[Result, dict[str, Any]]:
        environment = dict(env or {})
        if machine is not None:
            wanted: dict[str, Any] = {"software": software, "address": None, "hangs": False, "deadline_s": None}
            wanted |= {"root": str(tmp_path / "root"), "process": machine.write(tmp_path / "root")}
            file = tmp_path / "machine.json"
            file.write_text(json.dumps(wanted | pretended))
            environment["PRETENDED_MACHINE"] = str(file)
        given = [*base_flags, *flags(model_name_or_path=model_of("llama3")), *more]
        result = server.run(*given, env=environment)
        assert result.code == 0, result.stderr[-3000:]
        return result, report_of(tmp_path / "out")

    return command


def spoken(result: Result) -> list[str]:
    """The lines of the doctor on standard output."""
    marks = ("hf-rocm-tune: warning:", "hf-rocm-tune: failure:")
    return [line for line in result.stdout.splitlines() if line.startswith(marks)]


def test_a_troubled_machine_is_in_the_report_once_and_its_warnings_are_one_line_each(run: Run, tmp_path: Path) -> None:
    bad = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "PYTORCH_NO_HIP_MEMORY_CACHING": "1", "RCCL_DEBUG": "INFO"}
    machine = Built("a card behind a bad contact").card(aer={"correctable": 77, "nonfatal": 3})
    more = flags(save_strategy="steps", save_steps=4, telemetry_every=0.001)
    result, report = run(machine, *more, env=bad, software=ROCM, address=ADDRESS)
    about = [found for found in report["findings"] if found["check"] == "variables"]
    assert {found["subject"]: found["status"] for found in about} == {
        "HSA_OVERRIDE_GFX_VERSION": "fail",
        "PYTORCH_NO_HIP_MEMORY_CACHING": "warn",
        "RCCL_DEBUG": "info",
    }
    assert len(about) == 3
    assert all(found["fix"] and found["source"] and found["text"] for found in about)
    lines = [line for line in spoken(result) if "3 nonfatal" in line]
    assert len(lines) == 1 and "(" in lines[0] and ADDRESS in lines[0]
    assert any("3 nonfatal" in found["text"] for found in report["findings"] if found["status"] == "warn")
    assert len(spoken(result)) == len(set(spoken(result)))
    # The card's figures are in the report and beside the loss.
    (seen,) = report["telemetry"]
    assert (seen["rank"], seen["source"]) == (0, f"amdgpu, {ADDRESS}")
    assert seen["looks"] >= 4 and seen["hotspot_c"]["max"] >= seen["hotspot_c"]["mean"] > 0
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert [row["gpu/hotspot_c"] for row in history if "loss" in row] == [seen["hotspot_c"]["mean"]] * 4


def test_the_doctor_and_the_telemetry_can_be_switched_off(run: Run) -> None:
    machine = Built("a card behind a bad contact").card(aer={"correctable": 77})
    more = flags(doctor="off", telemetry_every=0)
    result, report = run(machine, *more, software=ROCM, address=ADDRESS)
    assert (report["findings"], report["telemetry"]) == ([], [])
    assert not [line for line in spoken(result) if "rows are cut" not in line], "only the data is spoken of"


NONSENSE = ("", "\x00\x01\x02", "nan", "-1", "9" * 400, "x y z\n" * 50)


def test_nonsense_in_every_file_of_the_machine_breaks_no_run(run: Run) -> None:
    machine = Built("nonsense").card().card().igpu()
    for number, path in enumerate(sorted(machine.files)):
        if number % 4 == 0:
            del machine.files[path]
            machine.names[path] = []  # a directory in its place
        else:
            machine.files[path] = NONSENSE[number % 6]
    machine.binary = dict.fromkeys(machine.binary, b"\x00\x01\x02\x03\x04\x05")
    _, report = run(machine, software=ROCM, address=ADDRESS)
    assert report["findings"]
    assert "hotspot_c" not in report["telemetry"][0]
    assert not [found for found in report["findings"] if found["row"] == "check_crashed"]


def test_a_driver_that_does_not_answer_holds_no_run_up(run: Run) -> None:
    machine = Built("one card").card()
    _, report = run(machine, hangs=True, deadline_s=0.5, software=ROCM)
    (found,) = [found for found in report["findings"] if found["check"] == "machine"]
    assert (found["status"], "0.5 seconds" in found["text"]) == ("unknown", True)


def test_two_ranks_look_once_and_each_speaks_of_its_card(
    server: CommandServer, model_of: Callable[[str], Path], base_flags: list[str], tmp_path: Path
) -> None:
    given = [*base_flags, *flags(model_name_or_path=model_of("llama3"))]
    ranks = [server.start(*given, env=each) for each in environments(tmp_path / "exit.json")]
    results = [rank.wait() for rank in ranks]
    assert [result.code for result in results] == [0, 0], results[0].stderr[-2000:] + results[1].stderr[-2000:]
    report = report_of(tmp_path / "out")
    assert [seen["rank"] for seen in report["telemetry"]] == [0, 1]
    assert {seen["source"] for seen in report["telemetry"]} == {"training on cpu: there are no sensors to read"}
    assert not [found for found in report["findings"] if not found["text"]]
    keys = [(found["check"], found["row"], found["subject"], found["text"]) for found in report["findings"]]
    assert keys and len(keys) == len(set(keys))
    assert spoken(results[1]) == []
