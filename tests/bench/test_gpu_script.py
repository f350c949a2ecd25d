"""`make gpu` without a card, and its first part on the simulated one: what it leaves, and what it does not say."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

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
