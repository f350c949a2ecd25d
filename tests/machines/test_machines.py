"""Each machine gives exactly its findings through the real command, and what holds for all of them in every form of
output; and every row that a check can say after reading is said on some machine here."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.doctor import links, software, system
from hf_rocm_tune.doctor.diagnose import all_checks
from hf_rocm_tune.machine.sources import link_of
from hf_rocm_tune.machine.variables import RULES
from tests.machine.trees import Built
from tests.machines.case import case, cpu_stack
from tests.machines.replay import COLUMNS, MACHINES, Replay, command, statuses


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gives_exactly_its_findings(name: str, replays: dict[str, Replay]) -> None:
    case, done = MACHINES[name], replays[name]
    assert statuses(done.findings, named=case.expected) == case.expected
    assert set(done.codes.values()) == {case.code}
    assert {one["check"] for one in done.findings if one["status"] == "unknown"} == set(case.unknown)
    assert set(case.fine) <= {one["row"] for one in done.findings if one["status"] == "ok"}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_told_what_its_owner_needs(name: str, replays: dict[str, Replay]) -> None:
    case, done = MACHINES[name], replays[name]
    assert [text for text in case.says if text not in done.words] == []
    everything = " ".join(" ".join(done.text.values()).split())
    assert [text for text in case.never if text in everything] == []


def read_rows() -> set[str]:
    """The rows that checks which only read can give."""
    found = set()
    for module in (system, software, links):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in LEVELS and node.args:
                found |= {part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)}
    return found


LEVELS = ("ok", "note", "warn", "fail", "status")
RISING = {"aer_rising", "aer_corrected_rising", "aer_still"}


def test_every_row_that_reading_can_give_is_given_by_a_machine(replays: dict[str, Replay]) -> None:
    given = {one["row"] for done in replays.values() for one in done.findings}
    assert len(read_rows()) > 45
    assert read_rows() - given - RISING == set()


def all_findings(replays: dict[str, Replay]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, done in replays.items():
        for one in done.findings:
            yield name, one


def test_a_finding_says_what_follows_what_to_do_and_whence(replays: dict[str, Replay]) -> None:
    sources = set[str]()
    for name, one in all_findings(replays):
        if one["status"] in ("unknown", "skipped"):
            assert one["text"].strip() and (one["row"], one["fix"], one["source"]) == ("", "", ""), name
            continue
        assert one["row"] and one["title"] and one["text"] and one["source"], (name, one)
        assert one["fix"] or one["status"] == "ok", (name, one["row"])
        sources |= set(one["source"].split("; "))
        assert one["links"] == [link for source in one["source"].split("; ") if (link := link_of(source))], name
        assert not re.search(r"FACTS|TODO", f"{one['text']}{one['source']}"), name
    assert sum(bool(link_of(source)) for source in sources) > len(sources) / 2
    named = {one for one in sources | {one for rule in RULES for one in rule.source.split("; ")} if "#" in one}
    allowed = re.compile(r"https://github\.com/(?!ROCm/ROCm/)[\w-]+/[\w.-]+/issues/[0-9]+")  # that was renamed
    assert len(named) > 25 and not [source for source in named if not allowed.fullmatch(link_of(source))]


@pytest.mark.parametrize("name", ["healthy_xt", "x8_x8", "rdna4", "kernel_6_17"])
def test_a_machine_in_order_is_one_line_a_group_without_a_fix(name: str, replays: dict[str, Replay]) -> None:
    done = replays[name]
    assert {one["status"] for one in done.findings} <= {"ok", "skipped"}
    lines = done.text["table"].splitlines()
    groups = {check.group for check in all_checks() if not check.measure}
    assert sum(line.startswith("ok  ") for line in lines) == len(groups)
    assert len(lines) <= 15 and "fix" not in done.text["table"]
    assert len(done.text["verbose"].splitlines()) > 4 * len(lines)


@pytest.mark.parametrize("name", [name for name, case in MACHINES.items() if case.cards < 2])
def test_on_one_card_there_is_no_word_on_pairs_or_the_iommu(name: str, replays: dict[str, Replay]) -> None:
    everything = " ".join(replays[name].text.values()).lower()
    for word in ("iommu", "pcie_p2p", "pair test", "peer-to-peer", "all_reduce", "peer_support"):
        assert word not in everything, word


def test_where_amd_contradicts_itself_nothing_is_an_order(replays: dict[str, Replay]) -> None:
    told = [one for _, one in all_findings(replays) if "iommu" in f"{one['title']} {one['text']} {one['fix']}".lower()]
    assert len(told) > 3
    for one in told:
        words = f"{one['title']} {one['text']} {one['fix']}"
        assert one["status"] == "ok" and "AMD documents two contradictory settings" in words
        assert not re.search(r"\b(must|required|always|never|have to|should)\b", words.lower()), words


def test_every_form_tells_the_same(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        flat, short = (" ".join(done.text[form].split()) for form in ("verbose", "table"))
        for one in done.findings:
            words = [one["title"], one["text"], *one["read"], one["fix"]] if one["row"] else [one["text"]]
            for word in words:
                assert " ".join(word.split()) in flat, (name, word)
                assert one["status"] not in ("warn", "fail") or " ".join(word.split()) in short, (name, word)
        counts = done.report["counts"]
        assert sum(counts.values()) == len(done.findings), name


def test_the_table_keeps_to_the_terminal(replays: dict[str, Replay]) -> None:
    for name, done in replays.items():
        for line in [*done.text["table"].splitlines(), *done.text["verbose"].splitlines()]:
            # Only what cannot be broken is longer: an address, or a name without spaces.
            assert len(line) <= COLUMNS or len(line.split()[-1]) > COLUMNS - 24, (name, line)
            assert line == line.rstrip() and line.isprintable(), (name, line)
        assert all(" measuring " in line for line in done.stderr.splitlines()), name


@pytest.mark.parametrize(
    ("before", "after", "code", "told"),
    [
        ({"correctable": 4}, {"correctable": 9}, 1, {"aer_clean": "ok", "aer_corrected_rising": "warn"}),
        ({"correctable": 4}, {"correctable": 4, "nonfatal": 1}, 2, {"aer_clean": "ok", "aer_rising": "fail"}),
        ({"nonfatal": 3}, {"nonfatal": 3}, 1, {"aer_errors": "warn", "aer_still": "ok"}),
        ({"correctable": 4}, {}, 0, {"aer_clean": "ok", "aer_still": "ok"}),  # set back: not risen
        ({"correctable": 4}, None, 0, {"aer_clean": "ok", "": "skipped"}),  # the card is gone: not called still
    ],
)
def test_errors_that_rise_while_measuring_are_told_by_what_they_mean(
    before: dict[str, int], after: dict[str, int] | None, code: int, told: Mapping[str, str], tmp_path: Path
) -> None:
    def machine(counts: dict[str, int]) -> Built:
        return Built("rocm-libraries#12344: the counters of a link, before and after").card(aer=counts)

    evidence = case(machine(before)).evidence(tmp_path)
    if after is None:
        (tmp_path / "sys/bus/pci/devices/0000:03:00.0").unlink()
    else:
        machine(after).write(tmp_path)
    found_code, out, _ = command("--only", "link_errors", "link_errors_after", "--json", evidence=evidence)
    assert {one["row"]: one["status"] for one in json.loads(out)["findings"]} == told
    assert found_code == code


@pytest.mark.parametrize("only", ["link", "links", "compiler", "bar", "training_resets", "kernel"])
def test_checks_that_find_nothing_to_check_are_no_good_news(only: str, tmp_path: Path) -> None:
    evidence = case(Built("a server without any GPU"), software=cpu_stack()).evidence(tmp_path)
    code, out, err = command("--only", only, evidence=evidence)
    assert code == 2 and not out
    assert f"--only {only}: nothing was checked, because" in err


def test_the_report_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "marguerite")
    monkeypatch.setenv("HOSTNAME", "thunderbird")
    monkeypatch.setenv("HOME", "/home/marguerite")
    environ = {"BNB_ROCM_VERSION": "/home/marguerite/x", "HCCL_X": "marguerite@thunderbird GPU-0123456789abcdef"}
    evidence = case(Built("invented").card(), environ=environ).evidence(tmp_path)
    for flags in (("-v",), ("--json",)):
        _, out, _ = command(*flags, evidence=evidence)
        assert "HCCL_X" in out
        assert not [word for word in ("marguerite", "thunderbird", "0123456789abcdef") if word in out.lower()]
