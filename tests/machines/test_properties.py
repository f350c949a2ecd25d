"""What holds for every machine and every form of output, whatever is found."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.doctor.command import Owner, pack, read_capture
from hf_rocm_tune.doctor.findings import NOT_TESTED_HERE, Finding, all_rows
from hf_rocm_tune.machine.survey import record
from hf_rocm_tune.machine.sysfs import RecordedTree
from hf_rocm_tune.machine.variables import POLICY, link_of
from tests.machines.catalogue import MACHINES
from tests.machines.conftest import COLUMNS
from tests.machines.replay import Replay, command, written

Found = dict[str, Any]
ONE_CARD = [name for name, case in MACHINES.items() if case.cards < 2]
SEVERITY = {"fail": 2, "warn": 1}
# Nobody: no name of a user, a host or a session may get from a recording into the output.
OWNER = Owner(users=("marguerite",), hosts=("thunderbird",), homes=("/home/marguerite",))


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
