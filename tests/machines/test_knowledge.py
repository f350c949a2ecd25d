"""Every row that a check can say after reading is said on some machine here, and with the status that it has."""

from __future__ import annotations

import tomllib

from hf_rocm_tune.doctor.findings import DATA_FILES, KNOWLEDGE, all_rows, knowledge_data
from tests.machines.catalogue import MACHINES
from tests.machines.replay import Replay

# Files whose rows only measuring brings up; each measured check has tests of its own.
MEASURED = "measured_"
NOT_READ = {
    "check_crashed",  # a bug of this project: tests/doctor
    "aer_rising",  # two readings with measuring in between: test_rising
    "aer_corrected_rising",
    "aer_still",
}


def read_rows() -> set[str]:
    """Rows that checks which only read can say."""
    files = [file for file in KNOWLEDGE.glob("*.toml") if file.name not in DATA_FILES]
    return {
        name for file in files if not file.name.startswith(MEASURED) for name in tomllib.loads(file.read_text("utf-8"))
    }


def test_every_row_that_reading_can_give_is_given_by_a_machine(replays: dict[str, Replay]) -> None:
    given = {one["row"] for done in replays.values() for one in done.findings}
    assert read_rows() - given - NOT_READ == set()
    assert read_rows() >= NOT_READ
    assert not NOT_READ & given


def test_every_warning_and_failure_is_expected_by_name() -> None:
    named = {row.split()[0] for case in MACHINES.values() for rows in case.expected.values() for row in rows}
    grave = {name for name in read_rows() if all_rows()[name].status in ("warn", "fail")}
    assert grave - named - NOT_READ == set()


def test_every_kernel_with_a_report_is_a_machine(replays: dict[str, Replay]) -> None:
    releases = [case.recording.get("process", {}).get("release", "") for case in MACHINES.values()]
    for name, entry in knowledge_data("kernels.toml").items():
        if "exact" in entry:
            assert [release for release in releases if release.startswith(entry["exact"])], name
        assert [done for done in replays.values() if entry["row"] in {one["row"] for one in done.findings}], name
