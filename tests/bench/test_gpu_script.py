"""`make gpu` without a card, and its first part on the simulated one: what it leaves, and what it does not say."""

from __future__ import annotations

import json
import os
import platform
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import simcard

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu.py"


def test_without_a_card_it_ends_after_the_versions_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.count("\n") == 1 and "no card" in done.stderr, done.stderr


def test_both_files_name_the_card_and_not_the_machine(tmp_path: Path) -> None:
    try:
        environment = {**os.environ, **simcard.environment(), "SIMCARD_ARCH": "gfx1100"}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "loss gradient"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    written = {file.suffix: file.read_text() for file in tmp_path.iterdir()}
    assert set(written) == {".json", ".txt"} and "attach these two files" in done.stdout
    result = json.loads(written[".json"])
    assert result["versions"]["architecture"] == "gfx1100"
    assert result["versions"]["digest"].startswith("torch: Triton cannot run a kernel: CalledProcessError")
    assert [row["outcome"] for row in result["parts"]] == ["ok", "ok"]
    assert "verified, tokens a second: not measured" in written[".txt"]
    for text in written.values():
        assert str(SCRIPT.parents[1]) not in text and str(Path.home()) + "/" not in text
        assert platform.node() not in text.replace(platform.platform(), "")


def test_a_kill_leaves_the_results_so_far_and_no_process_on_the_card(tmp_path: Path) -> None:
    try:
        environment = {**os.environ, **simcard.environment()}
    except simcard.NoCompiler as missing:
        pytest.skip(str(missing))
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "bench transfer"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as script:
        deadline = time.monotonic() + 120
        while not (list(tmp_path.glob("*.txt")) and (children := psutil.Process(script.pid).children())):
            assert script.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        script.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=120)[1] == []
    (written,) = tmp_path.glob("*.json")
    assert [row["part"] for row in json.loads(written.read_text())["parts"]] == ["versions"]


def test_fewer_minutes_are_shared_by_worth() -> None:
    parts = runpy.run_path(str(SCRIPT))["parts"]
    full, half = parts(10), parts(5)
    assert [part.name for part in full] == [part.name for part in half]
    assert [part.name for part in full][:5] == ["versions", "loss gradient", "methods", "bench transfer", "drill"]
    assert sum(part.seconds for part in full) <= 600 and sum(part.seconds for part in half) <= 340
    assert parts(60) == full, "more minutes give no part more than it needs"
    doctor = {minutes: next(part for part in parts(minutes) if part.name == "doctor") for minutes in (5, 10)}
    for part in doctor.values():
        assert float(part.command[part.command.index("--seconds") + 1]) < part.seconds


def test_the_text_names_what_the_doctor_found() -> None:
    findings = [{"status": status, "title": f"a {status}", "text": "why"} for status in ("ok", "warn", "fail")]
    row = {"part": "doctor", "outcome": "ok", "seconds": 1.0, "result": {"findings": findings}}
    result = {"card": "a card", "date": "", "command": "", "minutes": 10, "versions": {}, "parts": [row]}
    lines = runpy.run_path(str(SCRIPT))["_text"](result | {"left_out": []}).splitlines()
    assert [line for line in lines if line.endswith(": why")] == ["  WARN a warn: why", "  FAIL a fail: why"]
