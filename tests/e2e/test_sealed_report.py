"""A report that is cut off by the disk as it is written is never sealed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rocm_tune.survive import manifest
from tests.e2e.conftest import Job, MakeJob

SCRIPT = """
import os, sys
from pathlib import Path
from hf_rocm_tune.survive import atomic
from hf_rocm_tune.train import report
left = int(os.environ["CUTS"])
def cut(path, text):
    global left
    atomic.write_text_atomic(path, text)
    if path.name == report.FILE_NAME and left:
        left -= 1
        os.truncate(path, len(text) // 2)
report.write_text_atomic = cut
from hf_rocm_tune import sft
sys.exit(sft.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("sealed-report", train=8, test=2, max_steps=1, save_strategy="no")


@pytest.mark.parametrize(("cuts", "code"), [(1, 0), (99, 3)])
def test_a_report_that_is_no_json_is_not_sealed(job: Job, tmp_path: Path, cuts: int, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = job.run(tmp_path / "out", env={"SCRIPT": str(tmp_path / "script.py"), "CUTS": str(cuts)})
    assert done.code == code and "is no JSON any more" in done.stderr, done.stderr[-2000:]
    sealed = manifest.inspect(tmp_path / "out")
    if code:
        assert sealed.manifest is None
        return
    assert sealed.manifest is not None and sealed.problems == []
    assert json.loads((tmp_path / "out" / "transfer_report.json").read_text())["files"]["mismatches"] == 1
