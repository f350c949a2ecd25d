"""The doctor as a command: its forms, its choice of checks, its exit codes, and what it does when it is misused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rocm_tune import cli
from hf_rocm_tune.doctor.diagnose import VARIABLE, all_checks
from hf_rocm_tune.doctor.findings import GROUPS
from tests.machines.replay import MACHINES

ESCAPE = "\x1b["


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["doctor", *argv])
    except SystemExit as caught:  # argparse's --help
        code = int(caught.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A captured machine with a failure, warnings and notes."""
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINES["override_with_an_igpu"].recording), encoding="utf-8")
    return file


def test_the_table_says_everything_about_a_failure(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--from", str(machine))
    blocks = re.split(r"\n(?=\S)", out)
    block = next(block for block in blocks if block.startswith("FAIL"))
    assert block.splitlines()[0] == "FAIL  HSA_OVERRIDE_GFX_VERSION=11.0.0"
    labels = [line.split()[0] for line in block.splitlines()[1:]]
    assert {"fix", "source"} <= set(labels)
    assert "https://github.com/ROCm/TheRock/issues/5543" in block
    assert out.index(GROUPS["access"]) < out.index(GROUPS["variables"]) < out.index(GROUPS["links"])
    assert "1 failure, 1 note" in " ".join(out.split("\n\n")[-1].split())
    assert all(len(line) <= 100 or "https://" in line for line in out.splitlines())


def test_json_holds_every_finding_with_its_group_and_links(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--from", str(machine), "--json")
    told = json.loads(out)
    assert told["recorded"]
    (one,) = (one for one in told["findings"] if one["subject"] == "HSA_OVERRIDE_GFX_VERSION")
    assert (one["status"], one["group"], one["row"]) == ("fail", "variables", "environ:HSA_OVERRIDE_GFX_VERSION")
    assert one["links"]
    assert all(one["sources"] or one["status"] in ("unknown", "skipped") for one in told["findings"])


def test_markdown_can_be_pasted(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--from", str(machine), "--markdown")
    assert out.startswith("## hf-rocm-tune doctor")
    assert "[TheRock\\#5543](https://github.com/ROCm/TheRock/issues/5543)" in out
    assert not re.search(r"(?<!\\)[<@|]", re.sub(r"`[^`]*`|\]\([^)]*\)", "", out))


def test_only_and_skip_take_checks_and_groups(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def checks(*argv: str) -> set[str]:
        _, out, _ = run(capsys, "--from", str(machine), "--json", *argv)
        return {one["check"] for one in json.loads(out)["findings"]}

    names = {group: {check.name for check in all_checks() if check.group == group} for group in GROUPS}
    assert checks("--only", "variables") == {"variables"}
    assert checks("--only", "links,bar", "host") <= names["links"] | names["host"]
    assert checks("--only", "access", "--skip", "cards") == names["access"] - {"cards"}
    assert checks("--only", "link_width") == {"link_width"}
    assert not checks("--skip", "variables", "access") & (names["variables"] | names["access"])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--only", "variabels"], ["'variabels'", "did you mean variables?"]),
        (["--skip", "bandwith"], ["'bandwith'", "did you mean bandwidth?"]),
        (["--only", "zzzzz"], ["'zzzzz'", "--list"]),
        (["--only", "bar", "--skip", "links"], ["leave no check"]),
        (["--json", "--markdown"], ["--json", "--markdown"]),
        (["--form", "x"], ["--form"]),
        (["--from", "/nowhere/at/all.json"], ["/nowhere/at/all.json", "No such file"]),
        (["--from", "/dev/null"], ["/dev/null"]),
        (["--capture", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
        (["--capture", "/tmp"], ["/tmp"]),
        (["--capture", "x", "--from", "y"], ["--capture", "--from"]),
        (["--only"], ["--only"]),
        (["links"], ["links"]),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    argv: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(name in err for name in named), err


def test_an_unknown_fault_is_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "check=no_such_check,kind=wrong")
    code, out, err = run(capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert VARIABLE in err


@pytest.mark.usefixtures("asked_before")
def test_a_fault_that_is_asked_for_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "check=round_trip,kind=hang")
    _, out, _ = run(capsys, "--only", "shared_memory")
    assert "A FAULT IS INJECTED ON REQUEST" in out
    assert "check=round_trip,kind=hang" in out
    assert json.loads(run(capsys, "--only", "shared_memory", "--json")[1])["fault_injection"]


def test_the_list_names_every_check_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == [check.name for check in all_checks()]
    assert len(listed) == len(set(listed)) > 25
    assert "(with --full only" in out


def test_without_a_gpu_the_whole_doctor_says_what_it_could_not_check(tmp_path: Path) -> None:
    """On a machine with one, this is what it says where torch is not allowed to see it."""
    environ = {**os.environ, "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "", "HF_ROCM_TUNE_QUIET": "1"}
    code = (
        "import sys, json; from hf_rocm_tune import cli\n"
        "code = cli.main(['doctor', '--full', '--json'])\n"
        "assert code in (0, 1, 2), code\n"
        "heavy = {'torch', 'transformers', 'accelerate'} & set(sys.modules); assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    skipped = {one["check"]: one["text"] for one in told["findings"] if one["status"] == "skipped"}
    measured = {check.name for check in all_checks() if check.measured and check.needs_cards < 2}
    assert measured <= skipped.keys()
    assert all("torch sees no accelerator" in skipped[name] for name in measured)
    assert not [one for one in told["findings"] if one["row"] == "check_crashed"]


def test_colours_are_for_terminals_only_and_change_no_word(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plain, _ = run(capsys, "--from", str(machine))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, coloured, _ = run(capsys, "--from", str(machine))
    assert ESCAPE in coloured and ESCAPE not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()[:-1] == plain.splitlines()[:-1]


@pytest.mark.parametrize("width", [1, 40, 500])
def test_any_width_is_readable(
    width: int, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(capsys, "--from", str(machine))
    assert code == 2 and "FAIL" in out
    lines = [line for line in out.splitlines() if "http" not in line and "/" not in line]
    assert 50 < max(map(len, lines)) <= 120


def test_a_terminal_without_the_letters_of_a_name_shows_them_escaped(machine: Path) -> None:
    packed = json.loads(machine.read_text())
    packed["process"]["cpu"] = "Procésseur \u7b97"
    packed["files"]["proc/cpuinfo"] = "model name\t: Proc\u00e9sseur \u7b97\n"
    machine.write_text(json.dumps(packed), encoding="utf-8")
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "HF_ROCM_TUNE_QUIET": "1"}
    line = [sys.executable, "-m", "hf_rocm_tune", "doctor", "--from", str(machine)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Proc\\xe9sseur \\u7b97" in done.stdout


@pytest.mark.gpu
def test_with_a_gpu_every_short_check_gives_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--json")
    told = json.loads(out)
    assert not [one for one in told["findings"] if one["row"] == "check_crashed"]
    skipped = {one["check"]: one["text"] for one in told["findings"] if one["status"] == "skipped"}
    assert not [name for name, reason in skipped.items() if "sees no accelerator" in reason]
    long = {check.name for check in all_checks() if check.full and check.needs_cards < 2}
    assert all("--full" in skipped[name] for name in long)
