"""Children that measure: whatever becomes of one, the parent has an outcome in time and nothing is left running."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_rocm_tune.machine.child import ENDINGS, Outcome, Task, run_together
from tests.doctor.together import together

MODULE = "tests.machine.acting_child"
SOON = 3.0
LATE = 60.0


def act(
    deadline_s: float = LATE,
    environ: dict[str, str | None] | None = None,
    arguments: tuple[str, ...] = (),
    **request: Any,
) -> Outcome:
    task = Task(module=MODULE, arguments=arguments, request=request, environ=environ or {})
    return run_together([task], deadline_s=deadline_s)[0]


def gone(pid: int) -> bool:
    """Whether a process has ended, a moment after it was told to. What nobody has reaped yet has ended too."""
    for _ in range(100):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_result_comes_back_whatever_is_printed() -> None:
    outcome = act(arguments=("an", "argument"), say=["this", 1, None])
    assert outcome.status == "done" and outcome.code == 0
    assert outcome.result is not None and outcome.result["said"] == ["this", 1, None]
    assert outcome.tail == '["an", "argument"]'


LEFT = {
    "empty": ("", 0, "garbage"),
    "cut off": ('{"said": ', 0, "garbage"),
    "too large": ('{"a": "' + "7" * (9 << 20) + '"}', 0, "garbage"),
    "result and a bad code": ('{"said": 1}', 3, "died"),
    "deep": ("[" * 100_000, 0, "garbage"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, int]]:
    """How children ended, and their numbers: of each ending, of a deaf one, of exceptions, and with bad results."""
    root = tmp_path_factory.mktemp("pids")
    asked: dict[str, dict[str, Any]] = {
        kind: {"act": "slow", "seconds": 0, "fault": {"kind": kind, "where": "taking its time"}} for kind in ENDINGS
    }
    asked |= {"deaf": {"act": "deaf"}, "raise": {"act": "raise"}, "corruption": {"act": "corruption"}}
    asked |= {"flood": {"act": "flood"}, "grandchild": {"act": "grandchild", "grandchild_file": str(root / "below")}}
    asked |= {name: {"act": "leave", "text": text, "code": code} for name, (text, code, _) in LEFT.items()}
    late = dict.fromkeys(("hang", "stop", "deaf"), SOON)
    calls = {
        name: partial(act, late.get(name, LATE), pid_file=str(root / name), **request)
        for name, request in asked.items()
    }
    outcomes = together(calls, workers=4)
    assert gone(int((root / "below").read_text())), "a grandchild ends with its parent"
    return {name: (outcome, int((root / name).read_text())) for name, outcome in outcomes.items()}


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("hang", "timeout", "had not ended after"),
        ("stop", "timeout", "in state T"),
        ("kill", "died", "was ended by SIGKILL"),
        ("crash", "died", "was ended by SIGSEGV"),
        ("garbage", "garbage", "cannot be read"),
        ("silent", "died", "exit code 0 and no result"),
    ],
)
def test_every_ending_is_told_for_what_it_is(
    kind: str, status: str, words: str, ended: dict[str, tuple[Outcome, int]]
) -> None:
    outcome, pid = ended[kind]
    assert outcome.status == status and outcome.result is None
    assert words in outcome.how and "while taking its time" in outcome.how
    assert outcome.seconds < SOON + 5
    assert gone(pid)


def test_what_is_deaf_to_signals_is_killed_all_the_same(ended: dict[str, tuple[Outcome, int]]) -> None:
    outcome, pid = ended["deaf"]
    assert outcome.status == "timeout" and outcome.code == -signal.SIGKILL
    assert (outcome.step, outcome.state) == ("being deaf", "S")
    assert gone(pid)


def test_an_exception_is_told_in_one_line_and_an_error_of_ours_without_a_traceback(
    ended: dict[str, tuple[Outcome, int]],
) -> None:
    raised, ours, flood = ended["raise"][0], ended["corruption"][0], ended["flood"][0]
    assert (raised.status, raised.code, raised.error) == ("died", 1, "ValueError: a message of two lines")
    assert "Traceback" in raised.tail
    assert (ours.code, ours.error) == (3, "CorruptionError: wrong bytes") and "Traceback" not in ours.tail
    assert flood.tail.endswith("the last line") and len(flood.tail) <= 4000 and "\x1b" not in flood.tail


@pytest.mark.parametrize("name", LEFT)
def test_only_an_object_of_a_child_that_ended_well_is_a_result(
    name: str, ended: dict[str, tuple[Outcome, int]]
) -> None:
    assert ended[name][0].status == LEFT[name][2]
    assert ended["grandchild"][0].status == ended["flood"][0].status == "done"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_child_does_not_outlive_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        "from hf_rocm_tune.machine.child import Task, run_together\n"
        f"request = {{'act': 'slow', 'seconds': 600, 'pid_file': {str(file)!r}}}\n"
        f"run_together([Task(module={MODULE!r}, request=request)], deadline_s=600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    for _ in range(600):
        if file.exists() and file.read_text():
            break
        time.sleep(0.05)
    parent.send_signal(number)
    parent.wait(30)
    assert gone(int(file.read_text()))


def test_a_child_is_no_rank_of_a_job_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HF_ROCM_TUNE_FAULT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "max_split_size_mb:32")
    outcome = act(act="environ", environ={"PYTORCH_HIP_ALLOC_CONF": None, "HSA_ENABLE_SDMA": "0"})
    assert outcome.result is not None
    seen = outcome.result
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & seen.keys()
    assert not {"HF_ROCM_TUNE_FAULT", "PYTORCH_HIP_ALLOC_CONF"} & seen.keys()
    assert (seen["NCCL_PROTO"], seen["HSA_ENABLE_SDMA"], seen["HF_ROCM_TUNE_SPLIT"]) == ("Simple", "0", "1")


def test_files_in_the_users_directory_shadow_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wave.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    outcome = act(act="where")
    assert outcome.result is not None and outcome.result["cwd"] == str(tmp_path)
    assert not outcome.result["wave"].startswith(str(tmp_path))


def test_those_that_wait_for_a_dead_one_are_ended_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Task(module=MODULE, request={"act": "slow", "seconds": 600})
    dies = Task(module=MODULE, request={"act": "slow", "fault": {"kind": "kill"}})
    done = Task(module=MODULE, request={"say": "done"})
    began = time.monotonic()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcomes = run_together([waits, dies, done], deadline_s=600, grace_s=1)
    assert list(tmp_path.iterdir()) == [], "nothing is left in the temporary directory"
    assert time.monotonic() - began < 30
    assert [outcome.status for outcome in outcomes] == ["timeout", "died", "done"]


def test_a_child_that_cannot_be_started_has_died_of_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "nothing left")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    outcomes = run_together([Task(module=MODULE), Task(module=MODULE)], deadline_s=LATE)
    assert [(one.status, one.result) for one in outcomes] == [("died", None)] * 2
    assert "could not be started: nothing left" in outcomes[0].how
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_can_be_tried_by_hand() -> None:
    request = b'{"say": "hello"}'
    done = subprocess.run([sys.executable, "-m", MODULE], input=request, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"") and b'"said": "hello"' in done.stdout
