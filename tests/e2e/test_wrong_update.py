"""AdamW's step is wrong once or always in a real run: it ends with 3, and what it resumes to is the clean result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import ADAPTER, Job, MakeJob

SCRIPT = """
import importlib, itertools, os, sys
from hf_rocm_tune import sft
adam = importlib.import_module("torch.optim.adam")
stock, calls, kind, at = adam.adam, itertools.count(1), os.environ["KIND"], int(os.environ["AT"])
def wrong(new, grads, first, second, *rest, **more):
    old = [each.clone() for each in new]
    stock(new, grads, first, second, *rest, **more)
    if next(calls) == at:  # two groups a step, of which the second has no parameters
        for each, before, one, two in zip(new, old, first, second):
            if kind == "sign":
                each.copy_(2 * before - each)
            elif kind == "moment":
                two.mul_(1.5)
            elif kind == "lost":
                each.copy_(before)
adam.adam = wrong
sys.exit(sft.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job("wrong-update", train=24, test=4, max_steps=5, save_steps=2, learning_rate=1e-3)


KINDS = ["sign", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("moment", "lost"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [3, pytest.param(5, marks=pytest.mark.long), pytest.param(9, marks=pytest.mark.long)])
def test_a_wrong_update_ends_the_run_and_leaves_no_trace(job: Job, tmp_path: Path, kind: str, at: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {"SCRIPT": str(tmp_path / "script.py"), "KIND": kind, "AT": str(at)}
    ended = job.run(tmp_path / "out", env=env)
    assert ended.code == 3 and "the optimizer's update of" in ended.error_lines[0], ended.stderr[-2000:]
    job.done(tmp_path / "out")
    assert (tmp_path / "out" / ADAPTER).read_bytes() == (job.clean() / ADAPTER).read_bytes()
