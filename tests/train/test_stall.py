"""How long each phase may take, and that the watchdog speaks before the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from hf_rocm_tune import exits
from hf_rocm_tune.cards.watchdog import PeerLostError
from hf_rocm_tune.errors import CorruptionError, UsageError
from hf_rocm_tune.settings.arguments import RanksArguments
from hf_rocm_tune.supervisor import Settings, Watch
from hf_rocm_tune.survive import heartbeat
from hf_rocm_tune.survive.heartbeat import Heartbeat, Patience, Phase, read_pulse, touch_pulse
from hf_rocm_tune.train.stall import Limits, Progress, watched

AUTO = Limits.of("auto", None)
assert AUTO is not None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A training whose steps take as long as told."""

    def __init__(self, limits: Limits = AUTO) -> None:
        self.clock, self.marks = Clock(), list[str]()
        self.progress = Progress(limits, self.marks.append, self.clock)
        self.done = 0

    def beat(self, phase: Phase, *, after: float = 0.0, fresh: bool = False) -> None:
        self.clock.now += after
        self.progress.beat(step=self.done, phase=phase, fresh=fresh)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.beat("step")
            self.clock.now += seconds
            self.done += 1
            self.beat("between")

    @property
    def limit(self) -> float | None:
        return self.progress.look().limit_s


def test_before_the_training_and_in_the_first_steps_it_is_patient() -> None:
    run = Run()
    assert run.limit == 7200
    run.beat("between", fresh=True)
    assert run.limit == 1200
    run.steps(1, 500.0)  # kernels are compiled
    assert run.limit == 1200
    run.steps(2, 1.0)
    assert run.limit == 300


def test_a_step_is_held_to_the_median_of_the_last_ones() -> None:
    run = Run()
    run.beat("between", fresh=True)
    run.steps(9, 50.0)
    run.beat("step")
    assert run.limit == 500
    run.steps(100, 1.0)
    assert run.limit == 300
    run.steps(3, 900.0)  # a few slow ones do not count
    assert run.limit == 300


@pytest.mark.parametrize("phase", ["evaluate", "save", "end"])
def test_what_is_not_measured_gets_longer(phase: Phase) -> None:
    run = Run()
    run.steps(9, 1.0)
    run.beat(phase)
    assert run.limit == 1200
    run.beat("between")
    assert run.limit == 300


def test_a_new_pass_over_the_data_gets_longer_until_its_first_step_is_done() -> None:
    run = Run()
    run.steps(9, 1.0)
    run.beat("between", fresh=True)
    assert run.limit == 1200
    run.beat("step")
    run.beat("step", after=1.0)  # one of several micro-steps
    assert run.limit == 1200
    run.beat("between", after=1.0)
    assert run.limit == 300


def test_an_upload_has_no_limit() -> None:
    run = Run()
    run.beat("publish")
    assert run.limit is None


def test_every_phase_has_a_place_and_every_beat_is_marked() -> None:
    run = Run()
    for number, phase in enumerate(get_args(Phase)):
        run.done = number
        run.beat(phase)
        assert run.progress.look().where == run.marks[-1]
    assert "in step 2" in run.marks and "between steps 2 and 3" in run.marks
    assert len(set(run.marks)) == len(get_args(Phase)) == run.progress.look().beats


def test_seconds_of_the_user_are_the_limit_of_a_step() -> None:
    limits = Limits.of("20", None)
    assert limits is not None
    run = Run(limits)
    run.steps(9, 50.0)
    assert run.limit == 20
    run.beat("save")
    assert run.limit == 80
    assert limits.tick_s == 1.0
    short = Limits.of("0.5", None)
    assert short is not None and short.tick_s == 0.05
    assert Limits.of("0", None) is None


def test_the_supervisor_comes_after_the_watchdog() -> None:
    for setting in ("auto", "5000"):
        limits = Limits.of(setting, Patience(start_seconds=100.0, stall_seconds=50.0))
        assert limits is not None
        run = Run(limits)
        assert run.limit is not None and run.limit < 100
        run.beat("between", fresh=True)
        assert run.limit < 50
        run.steps(9, 40.0)
        assert run.limit < 50
    alone = Limits.of("auto", None, collective_s=1800)
    assert alone is not None and alone.most_s == 1440, "before RCCL gives up by itself"
    never = Limits.of("auto", Patience(start_seconds=0.0, stall_seconds=0.0))
    assert never is not None and (never.start_s, never.most_s) == (7200, float("inf"))


@pytest.mark.parametrize("text", ["never", "-1", "nan", "inf", "", "5s"])
def test_a_wrong_setting_is_one_message(text: str) -> None:
    with pytest.raises(UsageError, match="--stall_timeout"):
        RanksArguments(stall_timeout=text)


def test_the_supervisor_says_how_long_it_waits_and_holds_on_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Clock()
    watch = Watch(tmp_path, Settings(start_seconds=100, stall_seconds=10), now)
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path))
    assert heartbeat.patience() == Patience(start_seconds=100, stall_seconds=10)

    def look(seconds: int) -> None:
        for _ in range(seconds):
            now.now += 1.0
            watch.look()

    look(99)
    touch_pulse()
    look(100)
    assert watch.silence() is None, "it waits as long again"
    Heartbeat().beat(step=3, phase="step")
    watch.look()
    look(11)
    assert watch.silence() == 11.0
    touch_pulse()
    watch.look()
    assert watch.silence() is None
    assert read_pulse(tmp_path / heartbeat.PULSE_FILE)[0] == heartbeat.Pulse(step=3, phase="step")


LOST = RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:38547")


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
    with watched(setting, place=place, tell=print, environ={}):
        work()


@pytest.mark.parametrize("setting", ["auto", "0"])
@pytest.mark.parametrize("work", [raising(LOST), ended_while_it_unwinds])
def test_a_broken_connection_is_one_line(work: Callable[[], None], setting: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(PeerLostError):
            watch(work, tmp_path / "ranks", setting)
    finally:
        signal.signal(signal.SIGTERM, before)
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
            with watched("0.2", place=None, tell=exits.speak, environ={}) as guard:
                guard._progress.beat(step=0, phase="save")  # no trainer yet
                time.sleep(60)

        exits.run_guarded(hang, environ={})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    said = (tmp_path / "said").read_text()
    assert said.startswith("hf-rocm-tune: error: no progress for ") and said.count("\n") == 1
    assert "hang() in " in said
    (file,) = tmp_path.glob("hf-rocm-tune-stall-*/stall_report.txt")
    assert str(file) in said and "MainThread (most recent call last):" in file.read_text()
