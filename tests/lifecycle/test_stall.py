"""How long each phase may take, that the watchdog speaks first, and what a broken connection becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.lifecycle import exits
from hf_rocm_tune.lifecycle.heartbeat import Phase, Supervised
from hf_rocm_tune.lifecycle.stall import PeerLostError, StallGuard, is_lost_peer, watched
from hf_rocm_tune.settings.arguments import RanksArguments


class Run:
    """A training whose steps take as long as told."""

    def __init__(self, setting: str = "auto", supervisor: Supervised | None = None, **more: float) -> None:
        self.now, self.done = 0.0, 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: self.now)
            self.guard = StallGuard(setting, supervisor, **more)

    def beat(self, phase: Phase, *, after: float = 0.0) -> float | None:
        self.now += after
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: self.now)
            self.guard.beat(step=self.done, phase=phase)
        return self.guard.limit_s

    def steps(self, count: int, seconds: float) -> float | None:
        """The limit of the step after these."""
        for _ in range(count):
            self.beat("step")
            self.done += 1
            self.beat("between", after=seconds)
        return self.beat("step")


def test_a_step_is_held_to_the_median_of_the_last_ones_and_what_is_not_measured_gets_longer() -> None:
    run = Run()
    assert run.guard.limit_s == 7200
    assert run.beat("between") == 1200
    assert run.steps(1, 500.0) == 1200  # kernels are compiled
    assert run.steps(2, 1.0) == 300
    assert run.steps(9, 50.0) == 500
    assert run.steps(100, 1.0) == 300
    assert run.steps(3, 900.0) == 300  # a few slow ones do not count
    phases: tuple[Phase, ...] = ("between", "evaluate", "save", "end", "publish")
    assert [run.beat(phase) for phase in phases] == [1200, 1200, 1200, 1200, None]


def test_seconds_of_the_user_are_the_limit_of_a_step_and_the_supervisor_comes_later() -> None:
    run = Run("20")
    assert (run.steps(9, 50.0), run.beat("save")) == (20, 80)
    assert Run("0").guard.limit_s is None
    for setting in ("auto", "5000"):
        run = Run(setting, Supervised(directory="", start_seconds=100.0, stall_seconds=50.0))
        limits = [run.guard.limit_s, run.beat("between"), run.steps(9, 40.0)]
        assert all(each is not None and each < most for each, most in zip(limits, (100, 50, 50), strict=True))
    assert Run(collective_s=1000).beat("save") == 800, "before RCCL gives up by itself"
    assert Run(supervisor=Supervised(directory="", start_seconds=0.0, stall_seconds=0.0)).guard.limit_s == 7200
    for text in ("never", "-1", "nan", "inf", "", "5s"):
        with pytest.raises(UsageError, match="--stall_timeout"):
            RanksArguments(stall_timeout=text)


# ---- broken connections -------------------------------------------------------------------------------------

LOST = RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:38547")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"), True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_broken_connection_is_told_from_a_bug(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) == lost


def ended_while_it_unwinds() -> None:
    """The launcher ends the others, and its signal comes while the broken connection is being told."""
    try:
        raise LOST
    finally:
        raise KeyboardInterrupt("stopped by SIGTERM")


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def watch(work: Callable[[], None], place: Path | None = None, setting: str = "auto") -> None:
    with watched(setting, rendezvous=place, report=print, environ={}):
        work()


@pytest.mark.parametrize("setting", ["auto", "0"])
@pytest.mark.parametrize("work", [raising(LOST), ended_while_it_unwinds])
def test_a_broken_connection_is_one_line_that_names_the_rank_that_is_gone(
    work: Callable[[], None], setting: str, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = (
        "import sys; from pathlib import Path; from hf_rocm_tune.lifecycle.watchdog import RankStatus\n"
        "RankStatus(Path(sys.argv[1]), 1)"
    )
    place = tmp_path / "ranks"
    subprocess.run([sys.executable, "-c", code, str(place)], check=True, timeout=60)  # it joins, and dies
    try:
        with pytest.raises(PeerLostError, match=r"before the first step: rank 1 \(pid \d+\) ended") as told:
            watch(work, place, setting)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.value.exit_code == 4 and told.value.follows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), CorruptionError("bytes are wrong"), KeyboardInterrupt("stopped by Ctrl-C")]
)
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error), match=str(error)):
        watch(raising(error))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_before_the_run_owns_its_directory_the_report_goes_to_the_temporary_one(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        tempfile.tempdir = str(tmp_path)

        def hang() -> None:
            with watched("0.2", rendezvous=None, report=exits.speak, environ={}) as guard:
                guard.beat(step=0, phase="save")  # no trainer yet
                time.sleep(60)

        exits.run_guarded(hang, environ={})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    said = (tmp_path / "said").read_text()
    assert said.startswith("hf-rocm-tune: error: no progress for ") and said.count("\n") == 1
    assert "hang() in " in said
    (file,) = tmp_path.glob("hf-rocm-tune-stall-*/stall_report.txt")
    assert str(file) in said and "MainThread (most recent call last):" in file.read_text()
