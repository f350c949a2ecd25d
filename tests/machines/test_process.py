"""A machine diagnosed by a process of its own, as a user starts it: nothing of the machine that shows it gets in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines.catalogue import MACHINES
from tests.machines.replay import Replay, written


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
