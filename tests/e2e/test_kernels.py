"""A kernel that is wrong otherwise in every call is not taken for one that adds in another order, on a simulated card.

Attacks within a step in all ways of training are in `benchmarks/attacks.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import CommandServer, Result
from tests.e2e.conftest import ADAPTER, Job, MakeJob, done, report_of


@pytest.fixture(scope="module")
def job(card_server: CommandServer, make_job: MakeJob) -> Job:
    sizes = {"max_steps": 4, "save_steps": 2, "lora_dropout": 0.0, "doctor": "off", "dtype": "float32", "bf16": False}
    return make_job("kernels", server=card_server, train=16, test=4, **sizes)


def attacked(job: Job, output: Path, kernel: str, strength: float, **changed: Any) -> Result:
    told = {"kind": "kernel", "kernel": kernel, "how": "varying", "strength": strength, "log": f"{output}.log"}
    ended = job.run(output, env={"MEMORY_ATTACK": json.dumps(told)}, **changed)
    assert Path(f"{output}.log").exists()
    return ended


@pytest.mark.parametrize("kernel", ["RMSNorm", pytest.param("SiLU", marks=pytest.mark.long)])
def test_in_float32_small_differences_are_no_other_order(job: Job, tmp_path: Path, kernel: str) -> None:
    ended = attacked(job, tmp_path / "out", kernel, 0.001)
    assert ended.code == 3 and "4 runs give as many results" in ended.error_lines[0], ended.stderr[-2000:]


def test_what_was_equal_on_this_machine_before_is_no_other_order_now(job: Job, tmp_path: Path) -> None:
    """In 16 bits a first run is noted in the verdict; after a run that gave equal bits it ends."""
    home = {"HF_HOME": str(tmp_path / "home")}
    sizes = {"bf16": True, "save_strategy": "no"}
    env = {"MEMORY_ATTACK": json.dumps({"kind": "kernel", "kernel": "RMSNorm", "how": "varying", "strength": 0.001})}
    done(job.run(tmp_path / "first", env={**env, **home}, **sizes))
    assert report_of(tmp_path / "first")["arithmetic"]["deterministic"] is False
    right = done(job.run(tmp_path / "right", env=home, **sizes))
    assert report_of(tmp_path / "right")["arithmetic"]["deterministic"] is True and "differ" not in right.stderr
    ended = job.run(tmp_path / "again", env={**env, **home}, **sizes)
    assert ended.code == 3 and "4 runs give as many results" in ended.error_lines[0], ended.stderr[-2000:]
    assert not (tmp_path / "again" / ADAPTER).exists()
