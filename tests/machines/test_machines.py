"""Each machine gives exactly its findings through the real command, and what holds for all of them in every form of
output; and every row that a check can say after reading is said on some machine here.

Nobody's name may get from a recording into the output. Error counters that rise while the doctor measures need two
readings: the machine is a recording, read once before and once after.
"""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.doctor import command as doctor_command
from hf_rocm_tune.doctor import links
from hf_rocm_tune.doctor.command import PrivateNames, pack, read_capture
from hf_rocm_tune.doctor.findings import (
    DATA_FILES,
    KNOWLEDGE,
    NOT_TESTED_HERE,
    Evidence,
    Finding,
    all_rows,
    knowledge_data,
)
from hf_rocm_tune.machine.software import Software
from hf_rocm_tune.machine.survey import Machine, record, survey
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY, link_of
from tests.machine.trees import Built
from tests.machines.case import stack
from tests.machines.replay import COLUMNS, MACHINES, Replay, command, statuses, written


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


# What owners of these cards reported, each on a machine that has it and on the nearest one that has not.
REPORTED = [
    ("environ:PYTORCH_ALLOC_CONF", "fail", "expandable_segments_alone_on_gfx1201", "rdna4"),
    ("environ:PYTORCH_CUDA_ALLOC_CONF", "warn", "expandable_segments_alone", "healthy_xt"),
    ("mes_firmware_withdrawn", "warn", "strix_halo_with_withdrawn_firmware", "strix_halo"),
    ("mes_firmware_withdrawn", "warn", "strix_halo_with_withdrawn_firmware", "firmware_of_another_chip"),
    ("display_beside_compute", "info", "display_on_the_card", "healthy_xt"),
    ("kernel_sdma_faults", "warn", "kernel_7_0_12_of_another_distribution", "kernel_6_17"),
    ("rocm_ring_timeouts", "warn", "rocm_6_1", "rocm_6_2"),
    ("torch213_cpu_compile", "info", "torch_2_13_without_a_system_rocm", "healthy_xt"),
    ("wsl", "info", "wsl", "healthy_xt"),
]


@pytest.mark.parametrize(("row", "status", "there", "not_there"), REPORTED)
def test_a_report_of_owners_is_told_where_it_holds_and_not_beside_it(
    row: str, status: str, there: str, not_there: str, replays: dict[str, Replay]
) -> None:
    told = {one["row"]: one for one in replays[there].findings}
    assert told[row]["status"] == status and told[row]["links"] and told[row]["cure"]
    assert row not in {one["row"] for one in replays[not_there].findings}


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


Found = dict[str, Any]
ONE_CARD = [name for name, case in MACHINES.items() if case.cards < 2]
SEVERITY = {"fail": 2, "warn": 1}
# Nobody: no name of a user, a host or a session may get from a recording into the output.
OWNER = PrivateNames(users=("marguerite",), hosts=("thunderbird",), homes=("/home/marguerite",))


def shape(template: str) -> re.Pattern[str]:
    """The texts that a row's words can become."""
    parts = [
        re.escape(literal) + ("" if name is None else "(.*)")
        for literal, name, _, _ in string.Formatter().parse(template)
    ]
    return re.compile("".join(parts), re.DOTALL)


def in_order(findings: list[Found]) -> list[str]:
    return sorted(json.dumps(one) for one in findings)


def all_findings(replays: dict[str, Replay]) -> Iterator[tuple[str, Found]]:
    for name, done in replays.items():
        for one in done.findings:
            yield name, one


def test_every_statement_is_that_of_its_row(replays: dict[str, Replay]) -> None:
    rows = all_rows()
    for name, one in all_findings(replays):
        if not one["row"] or one["row"].startswith("environ:"):
            continue
        row = rows[one["row"]]
        where = (name, row.name)
        assert shape(row.title).fullmatch(one["title"]), where
        assert shape(row.cure).fullmatch(one["cure"]), where
        suffix = "" if row.tested_here else f" ({NOT_TESTED_HERE})"
        assert shape(row.says + suffix.replace("{", "{{")).fullmatch(one["text"]), where
        assert (one["status"], one["confidence"], one["sources"]) == (row.status, row.confidence, [*row.sources]), where
        assert one["sources"], where
        assert one["cure"] or one["status"] == "ok", where


def test_every_word_on_a_variable_is_that_of_the_policy(replays: dict[str, Replay]) -> None:
    met = 0
    for name, one in all_findings(replays):
        if not one["row"].startswith("environ:"):
            continue
        met += 1
        sources = "; ".join(one["sources"])
        rows = [row for row in POLICY if row.source == sources]
        # What is not certain on a machine is added in brackets behind the reason.
        assert [row for row in rows if re.match(shape(row.reason), one["text"]) or row.reason in one["text"]], name
        assert one["cure"], name
    assert met > 25


def test_what_is_not_known_has_a_reason_and_claims_nothing(replays: dict[str, Replay]) -> None:
    for name, one in all_findings(replays):
        if one["status"] in ("unknown", "skipped"):
            assert one["text"].strip(), name
            assert (one["row"], one["cure"], one["sources"]) == ("", "", []), name
        else:
            assert one["row"], name


def test_the_exit_code_is_the_worst_status(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        worst = max((SEVERITY.get(one["status"], 0) for one in done.findings), default=0)
        assert set(done.codes.values()) == {worst}, name
        assert done.report["exit_code"] == worst, name


def test_a_machine_in_order_is_never_alarmed(replays: dict[str, Replay]) -> None:
    for name in ("healthy_xt", "healthy_xtx", "rdna4", "no_iommu", "iommu_translating", "kernel_6_17", "kernel_6_12"):
        assert {one["status"] for one in replays[name].findings} <= {"ok", "skipped"}, name


@pytest.mark.parametrize("name", ONE_CARD)
def test_on_one_card_there_is_no_word_on_pairs_or_the_iommu(name: str, replays: dict[str, Replay]) -> None:
    rows = all_rows()
    for one in replays[name].findings:
        assert not one["row"] or one["row"].startswith("environ:") or rows[one["row"]].needs_cards < 2
        assert one["needs_cards"] < 2
    everything = " ".join(replays[name].text.values()).lower()
    for word in ("iommu", "pcie_p2p", "pair test", "peer-to-peer", "all_reduce", "peer_support"):
        assert word not in everything, word


def test_where_amd_contradicts_itself_nothing_is_an_order(replays: dict[str, Replay]) -> None:
    met = 0
    for name, one in all_findings(replays):
        words = f"{one['title']} {one['text']} {one['cure']}"
        if "iommu" not in words.lower():
            continue
        met += 1
        assert one["status"] == "info", name
        assert "AMD documents two contradictory settings" in words, name
        assert one["cure"].startswith("only if the pair test fails"), name
        assert not re.search(r"\b(must|required|always|never|have to|should)\b", words.lower()), name
    assert met > 5


def test_the_json_is_whole_and_becomes_findings_again(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        text = done.text["json"]
        assert json.loads(json.dumps(json.loads(text), allow_nan=False)) == json.loads(text), name
        for one in done.findings:
            links = one.pop("links")
            assert one.pop("group"), name
            again = Finding(**{**one, "evidence": tuple(one["evidence"]), "sources": tuple(one["sources"])})
            assert again.to_dict() == one, name
            assert links == [link for source in one["sources"] if (link := link_of(source))], name
        counts = done.report["counts"]
        assert sum(counts.values()) == len(done.findings), name


def test_every_form_tells_the_same(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        flat = " ".join(done.text["table"].split())
        marked = " ".join(done.text["markdown"].replace("\\", "").split())
        for one in done.findings:
            words = (
                [one["text"]]
                if one["status"] in ("unknown", "skipped")
                else [one["title"], one["text"], *one["evidence"]]
            )
            words += [one["cure"]] if one["status"] in ("info", "warn", "fail") else []
            for word in words:
                # Markdown shows code without backticks in it, and a wrapped line loses no more than its break.
                assert " ".join(word.split()) in flat, (name, word)
                assert " ".join(word.replace("`", "'").split()) in marked.replace("`", "'"), (name, word)


def test_the_table_keeps_to_the_terminal(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        for line in done.text["table"].splitlines():
            # Only what cannot be broken is longer: an address, or a name without spaces.
            assert len(line) <= COLUMNS or len(line.split()[-1]) > COLUMNS - 24, (name, line)
            assert line == line.rstrip(), (name, line)
            assert line.isprintable(), (name, line)
        assert not done.stderr, name


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_captured_machine_is_diagnosed_as_it_was(every: int, replays: dict[str, Replay], tmp_path: Path) -> None:
    for name, case in list(MACHINES.items())[::every]:
        evidence, _ = read_capture(written(case.recording, tmp_path / "built.json"))
        _, recorded = record(RecordedTree(case.recording))
        packed = pack(evidence, recorded, OWNER)
        code, out, _ = command("--from", str(written(packed, tmp_path / "captured.json")), "--json")
        # A capture has the variables in order of their names.
        assert in_order(json.loads(out)["findings"]) == in_order(replays[name].findings), name
        assert code == replays[name].codes["json"], name


def test_no_name_of_a_user_gets_into_the_output(tmp_path: Path) -> None:
    recording = MACHINES["an_old_guide"].recording
    group = "0::/user.slice/user-1000.slice/user@1000.service/marguerite-thunderbird.scope\n"
    files = {**recording["files"], "proc/self/cgroup": group, "proc/self/status": "Name:\tmarguerite\nSeccomp:\t0\n"}
    files["proc/cmdline"] = "BOOT_IMAGE=/vmlinuz rd.luks.name=marguerite systemd.hostname=thunderbird amdgpu.runpm=0\n"
    process = {**recording["process"], "groups": ["marguerite", "render"]}
    environ = recording["environ"] | {
        "MIOPEN_CUSTOM_CACHE_DIR": "/home/marguerite/.cache/miopen",
        "HCCL_X": "marguerite",
    }
    built = recording | {"files": files, "process": process, "environ": environ}
    evidence, _ = read_capture(written(built, tmp_path / "built.json"))
    packed = written(pack(evidence, record(RecordedTree(built))[1], OWNER), tmp_path / "captured.json")
    for flags in ((), ("--json",), ("--markdown",)):
        _, out, _ = command("--from", str(packed), *flags)
        assert "environ" in out or "HSA_OVERRIDE" in out
        assert not [word for word in ("marguerite", "thunderbird", "user-1000", "session-2") if word in out.lower()]


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


def started(file: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``python -m hf_rocm_tune doctor --from FILE`` with more variables set."""
    line = [sys.executable, "-m", "hf_rocm_tune", "doctor", "--from", str(file), *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ})


@pytest.mark.parametrize("name", ["x16_and_x4_of_the_chipset", "windows"])
def test_another_process_says_the_same(name: str, replays: dict[str, Replay], tmp_path: Path) -> None:
    done = started(written(MACHINES[name].recording, tmp_path / "machine.json"), "--json")
    assert json.loads(done.stdout)["findings"] == replays[name].findings
    assert (done.returncode, done.stderr) == (MACHINES[name].code, "")


def test_the_variables_of_this_process_are_not_those_of_the_machine(tmp_path: Path) -> None:
    file = written(MACHINES["healthy_xt"].recording, tmp_path / "machine.json")
    ours = {"HSA_OVERRIDE_GFX_VERSION": "9.4.2", "PYTORCH_NO_HIP_MEMORY_CACHING": "1", "HIP_VISIBLE_DEVICES": "7"}
    done = started(file, **ours)
    assert done.returncode == 0
    assert not [name for name in ours if name in done.stdout]


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path: Path) -> None:
    file = written(MACHINES["an_old_guide"].recording, tmp_path / "machine.json")
    line = f'"{sys.executable}" -m hf_rocm_tune doctor --from "{file}" | head -n 1'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("hf-rocm-tune doctor")
    assert done.stderr == ""
