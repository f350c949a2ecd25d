"""The doctor as a command: its forms, its choice of checks, its exit codes, and what it does when it is misused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.doctor import diagnose as diagnosing
from hf_rocm_tune.doctor.diagnose import MEASURED, all_checks, diagnose
from hf_rocm_tune.doctor.findings import GROUPS, Check, Evidence, Finding, fail
from tests.machine.trees import Built, Slot
from tests.machines.case import case, cpu_stack, cuda_stack, device, pair, stack
from tests.machines.replay import command


def evidence(root: Path, cards: int = 1, *, torch_sees: int | None = None) -> Evidence:
    built = Built("a machine")
    for _ in range(cards):
        built.card(slot=Slot(width=8))
    seen = cards if torch_sees is None else torch_sees
    return case(built, software=stack(devices=pair()[:seen]) if seen else cpu_stack()).evidence(root)


def found(out: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(out)["findings"]
    return rows


def test_only_takes_checks_and_groups(tmp_path: Path) -> None:
    known = evidence(tmp_path)

    def checks(*argv: str) -> set[object]:
        return {one["check"] for one in found(command("--json", *argv, evidence=known)[1])}

    names = {group: {check.name for check in all_checks() if check.group == group} for group in GROUPS}
    assert checks("--only", "variables") == {"variables"}
    assert checks("--only", "links,bar", "host") <= names["links"] | names["host"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--only", "bar", "bandwith"], ["bandwith", "--help"]),
        (["--faults", "3"], ["--faults", "--drill"]),
        (["--drill", "--only", "bar"], ["--drill", "--only"]),
        (["--drill", "--json", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
        (["--only", "variables", "--json", "/"], ["--json /"]),
        (["--only"], ["--only"]),
        (["links"], ["links"]),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(argv: list[str], named: list[str]) -> None:
    code, out, err = command(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(name in err for name in named), err


@pytest.mark.parametrize(
    ("cards", "torch_sees", "only", "why"),
    [
        (1, 0, ["gemm"], "torch sees no accelerator"),
        (1, 1, ["pairs"], "needs 2 cards"),
        (1, 1, ["iommu"], "needs 2 cards"),
        (2, 1, ["pairs"], "torch sees 1 of 2"),
    ],
)
def test_a_check_that_cannot_run_is_not_called_sound(
    cards: int, torch_sees: int, only: list[str], why: str, tmp_path: Path
) -> None:
    code, out, err = command("--only", *only, evidence=evidence(tmp_path, cards, torch_sees=torch_sees))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--only {only[-1]}: nothing was checked" in err and why in err


def test_the_help_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    shown = set(re.findall(r"\w+", capsys.readouterr().out))
    names = [check.name for check in all_checks()]
    assert shown.issuperset(names) and len(names) == len(set(names)) > 20


def test_without_a_gpu_the_whole_doctor_says_what_it_could_not_check(tmp_path: Path) -> None:
    """On a machine with one, this is what it says where torch is not allowed to see it."""
    environ = {**os.environ, "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "", "HF_ROCM_TUNE_QUIET": "1"}
    code = (
        "import sys, json; from hf_rocm_tune import cli\n"
        "code = cli.main(['doctor', '--full', '--json', 'report.json'])\n"
        "assert code in (0, 1, 2), code\n"
        "heavy = {'torch', 'transformers', 'accelerate'} & set(sys.modules); assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = found((tmp_path / "report.json").read_text())
    skipped = {one["check"]: one["text"] for one in rows if one["status"] == "skipped"}
    for check in MEASURED:
        assert check.needs_cards or "torch sees no accelerator" in str(skipped[check.name])
    assert not [one for one in rows if one["row"] == "check_crashed"]


def test_a_terminal_without_the_letters_of_a_name_and_a_reader_that_goes_away(tmp_path: Path) -> None:
    built = Built("invented").card()
    built.files["proc/cpuinfo"] = "model name\t: Proc\u00e9sseur \u7b97\n"
    built.write(tmp_path)
    code = (
        "import sys; from pathlib import Path; from unittest import mock\n"
        "from hf_rocm_tune import cli\nfrom hf_rocm_tune.doctor import command, findings\n"
        "from tests.machines.case import stack\n"
        f"machine = findings.survey(Path({str(tmp_path)!r}))\n"
        "known = findings.Evidence(machine=machine, software=stack(), environ={})\n"
        "with mock.patch.object(command, 'read_here', return_value=known):\n"
        "    sys.exit(cli.main(['doctor', '-v', '--only', 'access', 'kernel']))\n"
    )
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = f"'{sys.executable}' -c \"{code}\""
    whole, cut = (
        subprocess.run(line + end, shell=True, capture_output=True, text=True, timeout=60, env=environ)
        for end in ("", " | head -n 1")
    )
    assert "Proc\\xe9sseur \\u7b97" in whole.stdout and whole.stderr == ""
    assert cut.stdout.startswith("hf-rocm-tune doctor") and cut.stderr == ""


# ---- running the checks ----------------------------------------------------------------------------------------------


def finding(row: str) -> Finding:
    return fail(row, "title", "text", "fix", "source")


def check(name: str, *finds: Finding, group: str = "links", **more: object) -> Check:
    return Check(name=name, group=group, about=name, run=lambda evidence: finds, **more)  # type: ignore[arg-type]


def crashing(error: BaseException) -> Check:
    def run(evidence: Evidence) -> Iterator[Finding]:
        yield finding("kept")
        raise error

    return Check(name="crashing", group="links", about="crashes", run=run)


@pytest.mark.parametrize("error", [ValueError("odd\nthing"), AssertionError()])
def test_a_check_that_crashes_is_reported_and_stops_nothing(error: BaseException, tmp_path: Path) -> None:
    checks = [check("before", finding("a")), crashing(error), check("after", finding("b"))]
    done = diagnose(evidence(tmp_path), checks)
    assert [one.check for one in done.findings] == ["before", "crashing", "crashing", "after"]
    crashed = done.findings[2]
    assert (crashed.row, crashed.status) == ("check_crashed", "warn")
    assert type(error).__name__ in crashed.text and "\n" not in crashed.text
    with pytest.raises(KeyboardInterrupt):
        diagnose(evidence(tmp_path), [crashing(KeyboardInterrupt())])


def test_after_two_hangs_nothing_more_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a": "measurement_hung", "b": "pair_hung", "fine": "fine"}
    monkeypatch.setattr(diagnosing, "run_measured", lambda check, _: [finding(rows[check.name])])
    measured = {name: replace(check(name), run=None, measure="x.y") for name in rows}
    read = check("read", finding("read"))
    known = evidence(tmp_path)
    done = diagnose(known, [measured["a"], measured["b"], measured["fine"], read])
    assert [one.status for one in done.findings] == ["fail", "fail", "skipped", "fail"]
    assert done.findings[2].text == "a and b did not return; --only fine measures it anyway"
    assert [one.status for one in diagnose(known, [measured["a"], measured["fine"]]).findings] == ["fail", "fail"]


def test_full_measures_longer_and_each_card_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(diagnosing, "run_measured", lambda check, request: asked.append((check.name, request)) or [])
    known = evidence(tmp_path, 2)
    diagnose(known, MEASURED)
    assert [name for name, _ in asked].count("gemm") == 2 and [name for name, _ in asked].count("pairs") == 1
    short = dict(asked)
    asked.clear()
    diagnose(known, MEASURED, full=True)
    for name in ("round_trip", "canaries", "pairs", "gemm"):
        assert dict(asked)[name] != short[name]
    assert short["gemm"]["address"] == "0000:06:00.0" and short["gemm"]["hip"] is True


def test_an_integrated_gpu_is_no_second_card(tmp_path: Path) -> None:
    devices = [device(), device("0000:04:00.0", index=1, arch="gfx1036", gib=0.5)]
    known = case(Built("beside").card().igpu(), software=stack(devices=devices)).evidence(tmp_path / "one")
    assert known.card_count == 1
    cuda = cuda_stack(device("0000:01:00.0"), device("0000:02:00.0", index=1))
    assert case(Built("cuda").nvidia().nvidia(), software=cuda).evidence(tmp_path / "two").card_count == 2


@pytest.mark.gpu
def test_with_a_gpu_every_short_check_gives_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--json"])
    rows = found(capsys.readouterr().out)
    assert not [one for one in rows if one["row"] == "check_crashed" or "accelerator" in str(one["text"])]
