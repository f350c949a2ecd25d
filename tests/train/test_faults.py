"""Faults on request: what is asked for is checked, and crashes strike as often as asked over all starts of a run."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.train.faults import (
    CRASH_VARIABLE,
    STEP_VARIABLE,
    Crashes,
    StepFaultSpec,
)


@pytest.mark.parametrize(
    ("text", "named"),
    [("step=4", "'kind' is missing"), ("kind=melt", "kind=melt"), ("kind=kill,step=0", "step=0"),
     ("kind=kill,rank=-1", "rank=-1"), ("kind=kill;;step=3", "'kind' is missing")],
)  # fmt: skip
def test_a_wrong_text_is_one_message(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=CRASH_VARIABLE) as caught:
        Crashes({CRASH_VARIABLE: text})
    assert named in str(caught.value)


def start(place: Path, text: str, *, rank: int = 0, run_id: str = "a") -> tuple[int, str]:
    """Five steps in a process of its own: its exit code, and the last step that was passed."""
    passed = place / "passed"
    passed.write_text("")
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        crashes = Crashes({CRASH_VARIABLE: text, "RANK": str(rank)})
        for step in range(1, 6):
            crashes.crash_if_due(step, directory=place, run_id=run_id)
            passed.write_text(str(step))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), passed.read_text()


pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


def test_it_strikes_as_often_as_asked_over_all_starts(tmp_path: Path) -> None:
    text = "kind=kill,step=3,times=2;kind=exit,step=4"
    assert start(tmp_path, text, rank=1) == (0, "5"), "another rank"
    assert [start(tmp_path, text) for _ in range(4)] == [(-9, "2"), (-9, "2"), (1, "3"), (0, "5")]
    assert start(tmp_path, text, run_id="b") == (-9, "2"), "another run counts again"


@pytest.mark.parametrize(
    ("text", "named"),
    [("kind=ooom", "one of oom nan"), ("rate=1", "'kind' is missing"), ("kind=oom,rate=2", "from 0 to 1"),
     ("kind=oom,rows=two", "expected a whole number"), ("kind=oom,where=left", "forward backward"),
     ("kind=oom,first=0", "from 1 on")],
)  # fmt: skip
def test_a_step_fault_that_is_not_understood_is_refused(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=STEP_VARIABLE) as caught:
        StepFaultSpec.parse(text)
    assert named in str(caught.value)
