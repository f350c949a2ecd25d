"""``hf-rocm-tune run -- COMMAND``: watches a training job and restarts it from its newest verified checkpoint.

The command runs in its own session, so Ctrl-C in the terminal reaches only the supervisor, which passes it on once.
Every process of the job inherits `supervised.VARIABLE` with a unique value, by which remaining processes of an attempt
are found: a rank or a loader worker that outlives its launcher would hold the card's memory and the output directory.

Not covered: a process in an uninterruptible sleep in the driver, which no signal ends; it is named. If the supervisor
is killed, the command keeps running. Nothing here imports torch, whose failures must not affect the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import psutil

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.exits import EXIT_FILE_VARIABLE, FINAL_CODES, INTERRUPTED, PROGRAM
from hf_rocm_tune.machine.gpus import core_dumps
from hf_rocm_tune.redaction import one_line, redact
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.heartbeat import (
    BEGUN_FILE,
    EARLIER_FILE,
    JOURNAL_FILE,
    PULSE_FILE,
    VARIABLE,
    Begun,
    Patience,
    Phase,
    Pulse,
    enter,
    leave_terminal,
    read_begun,
    read_pulse,
    tell_patience,
)
from hf_rocm_tune.survive.run_directory import list_checkpoints, read_record, skip_step

ENTRIES = frozenset(get_args(Method))
"""Training modules of this package, which are also verbs."""
DEATHS_TO_SKIP = 2
DEATHS_TO_STOP = 4
EXCEPTIONS_TO_STOP = 2

_PACKAGE = "hf_rocm_tune"
# accelerate's launcher of a single process does not forward signals and dies before its job, so ours wraps it.
_LAUNCHER = [sys.executable, "-m", f"{_PACKAGE}.launch"]
_FORMS = (
    "`accelerate launch ... -m hf_rocm_tune.sft ...`, `hf-rocm-tune sft ...`, `torchrun ... -m hf_rocm_tune.sft ...` "
    "or `python -m hf_rocm_tune.sft ...` (or another training verb)"
)
_POLL_SECONDS, _LOOK_SECONDS, _LONGEST_LOOK_SECONDS, _SAME_PRESS_SECONDS = 0.05, 0.2, 1.0, 1.0
_KILL_SECONDS = 30.0
"""How long SIGKILL may take: the kernel first releases the process's resources."""
_LONGEST_WAIT_SECONDS = 300.0
# torch's agent kills its workers this long after a signal, 30 seconds unless told: a checkpoint may take longer.
_AGENT_TIMEOUT = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of ``hf-rocm-tune run``.

    Args:
        max_restarts: restarts without a new verified checkpoint between them.
        max_skips: optimizer steps that may be skipped in the whole run; more are not caused by bad batches.
        stall_seconds: without a heartbeat (one per micro-step) after which a training job is ended; 0 for never.
        start_seconds: the same before the first step, which has no heartbeats: downloads, tokenising.
        backoff_seconds: before the first restart; doubled for each further one without a new checkpoint, up to five
            minutes.
        grace_seconds: from SIGTERM to SIGKILL for a stalled job.
    """

    max_restarts: int = 8
    max_skips: int = 3
    stall_seconds: float = 1800.0
    start_seconds: float = 7200.0
    backoff_seconds: float = 5.0
    grace_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{name} must be 0 or more, got {getattr(self, name)}")


def supervise(words: Sequence[str], settings: Settings) -> int:
    """Run a training command to its end, through crashes and stalls.

    Returns:
        0 for success, 130 for an interruption, else the code of the last attempt: 4 for a stall, 128 + n for signal n.

    Raises:
        UsageError: the command cannot be supervised or started.
        StallError: a process survives SIGKILL.
    """
    argv = to_start(words)
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-run-") as directory, _asked_to_end() as asked:
        return _Supervision(argv, shown(words), settings, Path(directory), asked).run()


# ---- which command lines can be supervised ------------------------------------------------------------------


def to_start(words: Sequence[str]) -> list[str]:
    """The command line to start for the user's one, which must be a training job of this package."""
    program, rest = os.path.basename(words[0]) if words else "", list(words[1:])
    found: list[str] | None = None
    if program == "hf-rocm-tune" and rest[:1] and rest[0] in ENTRIES:
        found = [sys.executable, "-m", _PACKAGE, *rest]
    elif program == "accelerate-launch" and _runs_ours(rest):
        found = [*_LAUNCHER, *rest]
    elif program == "accelerate" and rest[:1] == ["launch"] and _runs_ours(rest):
        found = [*_LAUNCHER, *rest[1:]]
    elif program == "torchrun" and _runs_ours(rest):
        found = list(words)
    elif program.startswith("python"):
        found = _python(list(words))
    if found is None:
        given = shown(words) if words else "nothing"
        raise UsageError(f"run supervises {_FORMS}; got: {given[:200]}")
    return found


def shown(words: Sequence[str]) -> str:
    """The command line without secrets, for messages."""
    return redact(shlex.join(words))


def _python(words: list[str]) -> list[str] | None:
    """``python [options] -m MODULE ...``."""
    if "-m" not in words[:-1]:
        return None
    place = words.index("-m") + 1
    module, rest = words[place], words[place + 1 :]
    if module == _PACKAGE:
        return words if rest[:1] and rest[0] in ENTRIES else None
    if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        return to_start(["accelerate", *(["launch"] if module.endswith("launch") else []), *rest])
    if module == "torch.distributed.run":
        return words if _runs_ours(rest) else None
    return words if _is_ours(module) else None


def _runs_ours(words: Sequence[str]) -> bool:
    return any(flag in ("-m", "--module") and _is_ours(module) for flag, module in pairwise(words))


def _is_ours(module: str) -> bool:
    package, _, entry = module.partition(".")
    return package == _PACKAGE and entry in ENTRIES


# ---- what to do after a death -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Death:
    """How an attempt ended that should have continued."""

    how: str  # for people: "ended by SIGKILL"
    code: int  # the supervisor's exit code for it
    phase: Phase | None  # at the last heartbeat; None before the first one
    step: int  # optimizer steps done by then
    resumed_at: int  # step of the checkpoint from which this attempt resumed; 0 from the start
    checkpoint: int  # step of the newest verified checkpoint now; 0 for none
    cut: int = 1  # parts of a micro-batch in the next attempt, after running out of memory


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    """What to do now, and why."""

    action: Literal["restart", "stop"]
    reason: str
    skip: int | None = None  # an optimizer step to skip from now on
    wait_seconds: float = 0.0  # before the restart


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an attempt died, and the optimizer step that may be the cause: the current one, or the last one, whose
    kernels may still have been running."""

    name: str
    step: int | None = None


_AT_THE_START = Place(name="before the first step")


def place_of(death: Death) -> Place:
    if death.phase in (None, "start"):
        return _AT_THE_START
    if death.phase == "step":
        return Place(name=f"in step {death.step + 1}", step=death.step + 1)
    if death.phase == "between" and death.step == death.resumed_at:
        return _AT_THE_START
    if death.phase == "between":
        return Place(name=f"in step {death.step}", step=death.step)
    names = {
        "evaluate": f"in the evaluation after step {death.step}",
        "save": f"in the checkpoint of step {death.step}",
        "end": "in the save of the result",
        "publish": "in the upload of the result",
    }
    return Place(name=names[str(death.phase)])


def decide(deaths: Sequence[Death], skipped: Collection[int], settings: Settings) -> RestartDecision:
    """The decision after the last of these deaths (oldest first). Codes 0, 2, 3 and 130 are not deaths.

    Rules, in this order: died in the upload: stop, the result is complete; the second exception (code 1) before the
    first step: stop; the fourth death at the same place, or more restarts without a new checkpoint than allowed: stop;
    the second death at the same step: skip that step from now on. Only deaths since the newest checkpoint count, and at
    one place only those with the same size of micro-batches.
    """
    last, place = deaths[-1], place_of(deaths[-1])
    if last.phase == "publish":
        return RestartDecision(action="stop", reason="the result is complete on disk, only its upload failed")
    recent = [death for death in deaths if death.checkpoint == last.checkpoint]
    here = sum(place_of(death) == place and death.cut == last.cut for death in recent)
    raised = sum(death.code == 1 and place_of(death) == _AT_THE_START for death in recent)
    if here >= DEATHS_TO_STOP or raised >= EXCEPTIONS_TO_STOP:
        also = ", although it is skipped" if place.step in skipped else ""
        return RestartDecision(action="stop", reason=f"died {here} times {place.name}{also}")
    if len(recent) > settings.max_restarts:
        return RestartDecision(action="stop", reason=f"{settings.max_restarts} restarts without a new checkpoint")
    wait = min(settings.backoff_seconds * 2 ** (len(recent) - 1), _LONGEST_WAIT_SECONDS)
    if here >= DEATHS_TO_SKIP and place.step is not None and place.step not in skipped:
        if len(skipped) >= settings.max_skips:
            steps = ", ".join(map(str, sorted(skipped)))
            why = f"steps {steps} are skipped already" if skipped else "no step may be skipped"
            return RestartDecision(action="stop", reason=f"died {here} times {place.name}, and {why} (--max_skips)")
        return RestartDecision(
            action="restart",
            skip=place.step,
            wait_seconds=wait,
            reason=f"died {here} times {place.name}: the step is skipped, its batches are not trained on",
        )
    return RestartDecision(action="restart", wait_seconds=wait, reason=f"died {place.name}")


# ---- one attempt: its processes, heartbeats and journal ------------------------------------------------


class Child:
    """A started command; ``directory`` marks all its processes."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], directory: Path) -> None:
        self._mark = str(directory)
        try:
            self._process = subprocess.Popen(
                list(argv), env={**environ, VARIABLE: self._mark}, start_new_session=True, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self, grace_seconds: float) -> list[int]:
        """SIGTERM, then SIGKILL to its remaining processes. Returns the ids of processes that survived."""
        self.send(signal.SIGTERM)
        _wait(lambda: self.poll() is not None, grace_seconds)
        left = self._left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait(lambda: self.poll() is not None and not self._left(), _KILL_SECONDS if left else 0.0)
        return self._left()

    def _left(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(VARIABLE) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


def _wait(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


class Watch:
    """Progress of one attempt, from the files that it writes into ``directory``.

    Files of an earlier attempt are moved away first. Time counts only while this process looks: a job may be stopped
    as a whole, with its supervisor.
    """

    def __init__(self, directory: Path, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._settings, self._clock = directory, settings, clock
        (directory / PULSE_FILE).unlink(missing_ok=True)
        if (directory / BEGUN_FILE).exists():
            (directory / BEGUN_FILE).replace(directory / EARLIER_FILE)
        limits = Patience(start_seconds=settings.start_seconds, stall_seconds=settings.stall_seconds)
        tell_patience(directory, limits)
        self.begun: Begun | None = None
        self.pulse: Pulse | None = None
        self._stamp = 0
        self._silent, self._looked = 0.0, clock()

    def look(self) -> None:
        if self.begun is None:
            self.begun = read_begun(self._directory / BEGUN_FILE)
        passed, self._looked = self._clock() - self._looked, self._clock()
        self._silent += min(passed, _LONGEST_LOOK_SECONDS)
        pulse, stamp = read_pulse(self._directory / PULSE_FILE)
        if pulse is not None and (pulse, stamp) != (self.pulse, self._stamp):
            self.pulse, self._stamp, self._silent = pulse, stamp, 0.0

    def silence(self) -> float | None:
        """Seconds without a heartbeat if above the limit; else None."""
        if self.pulse is not None and self.pulse.phase == "publish":
            return None  # an upload has no heartbeats
        starting = self.pulse is None or self.pulse.phase == "start"
        limit = self._settings.start_seconds if starting else self._settings.stall_seconds
        return self._silent if limit and self._silent > limit else None


class Ledger:
    """The journal, ``survival.jsonl``: kept in memory until the job has begun, because a refused job (another run's
    directory, wrong flags) must not write there. Of several machines one supervisor writes, see `belongs_to`.
    ``failure``: why the last entry could not be written.
    """

    def __init__(self) -> None:
        self._begun: Begun | None = None
        self._is_kept_elsewhere = False
        self._waiting: list[dict[str, Any]] = []
        self.failure: OSError | None = None

    def add(self, event: str, **details: Any) -> None:
        """Add an entry, without None values, unless another machine's supervisor keeps the journal."""
        if self._is_kept_elsewhere:
            return
        told = {key: value for key, value in details.items() if value is not None}
        self._waiting.append({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **told})
        self._write()

    def belongs_to(self, begun: Begun) -> None:
        """Set the run and its directory; the supervisor of rank 0 keeps the journal."""
        self._begun = begun
        self._is_kept_elsewhere = not begun.leads
        if self._is_kept_elsewhere:
            self._waiting.clear()
        self._write()

    def _write(self) -> None:
        self.failure = None
        while self._begun is not None and self._waiting:
            try:
                entry = {"run_id": self._begun.run_id, **self._waiting[0]}
                enter(Path(self._begun.output_dir), entry)
            except OSError as error:
                self.failure = error
                return
            self._waiting.pop(0)


# ---- all attempts ---------------------------------------------------------------------------------------------


class _Asked:
    """Signals to the supervisor: the first one and the second Ctrl-C are passed on, the third Ctrl-C kills."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._last = -_SAME_PRESS_SECONDS

    def hear(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        now = time.monotonic()
        if not self.signals or (number == signal.SIGINT and now - self._last > _SAME_PRESS_SECONDS):
            self.signals.append(number)
            self._last = now


@dataclass(frozen=True, kw_only=True)
class _End:
    """How one attempt ended."""

    code: int
    how: str
    message: str | None = None
    stalled: bool = False


class _Supervision:
    def __init__(self, argv: list[str], shown: str, settings: Settings, directory: Path, asked: _Asked) -> None:
        self._argv, self._shown, self._settings, self._directory, self._asked = argv, shown, settings, directory, asked
        self._ledger = Ledger()
        self._deaths: list[Death] = []
        self._begun: Begun | None = None
        self._dumps: frozenset[str] = frozenset()

    def run(self) -> int:
        while True:
            number = len(self._deaths) + 1
            _say(f"start {number}: {self._shown}")
            self._dumps = core_dumps()
            watch = Watch(self._directory, self._settings)
            record, (name, value) = self._directory / "exit.json", _AGENT_TIMEOUT
            record.unlink(missing_ok=True)
            environ = {name: value, **os.environ, EXIT_FILE_VARIABLE: str(record)}
            end = self._see_through(Child(self._argv, environ, self._directory), watch)
            decision = self._judge(end, watch)
            self._enter(end, watch, decision)
            if decision is None:
                if end.code in FINAL_CODES:
                    _say(f"not restarted: {end.how} is final")
                asked = self._asked.signals and end.code not in {0, *FINAL_CODES}
                return INTERRUPTED if asked else end.code
            self._carry_out(decision, end)
            if decision.action == "stop":
                return end.code
            deadline = time.monotonic() + decision.wait_seconds
            while not self._asked.signals and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if self._asked.signals:
                _say("not restarted, as requested; the same command continues from the newest checkpoint")
                return INTERRUPTED

    def _see_through(self, child: Child, watch: Watch) -> _End:
        passed_on, stalled, cut_short = 0, None, False
        while child.poll() is None:
            time.sleep(_LOOK_SECONDS)
            self._look(watch)
            if len(self._asked.signals) > passed_on:
                passed_on += 1
                if cut_short := passed_on > 2:
                    break
                child.send(self._asked.signals[passed_on - 1])
            elif (stalled := watch.silence()) is not None:
                _say(f"no heartbeat for {stalled:.0f} s: ending the job")
                break
        if cut_short or stalled is not None or child.poll() not in (0, INTERRUPTED):
            self._clean_up(child, self._settings.grace_seconds if stalled is not None else 0.0)
        self._look(watch)
        if stalled is not None:
            return _End(code=StallError.exit_code, how=f"no heartbeat for {stalled:.0f} s", stalled=True)
        return self._ending(child.poll())

    def _clean_up(self, child: Child, grace_seconds: float) -> None:
        """End all processes of this attempt, which would hold the card's memory and the output directory."""
        survivors = child.end(grace_seconds)
        if survivors:
            what = f"processes {survivors} of the job survive SIGKILL, so they hang in the driver"
            self._ledger.add("end", how=what, code=StallError.exit_code)
            raise StallError(f"{what} and hold the GPU: restart the machine, then repeat the command")

    def _look(self, watch: Watch) -> None:
        known = watch.begun
        watch.look()
        if watch.begun is not None and known is None:
            self._begun = watch.begun
            self._ledger.belongs_to(watch.begun)
            start = len(self._deaths) + 1
            self._ledger.add("start", start=start, resumed_from=watch.begun.resumed_from or "the start")

    def _ending(self, status: int | None) -> _End:
        assert status is not None
        try:
            told = json.loads((self._directory / "exit.json").read_text(encoding="utf-8"))
            if told.get("follows"):  # a rank without our launcher lost its peer, which was not printed yet
                _complain(str(told["message"]))
            if int(told["code"]) != 0 or status == 0 or self._asked.signals:  # else it died after success
                return _End(code=int(told["code"]), how=f"exit code {told['code']}", message=str(told["message"]))
        except (OSError, ValueError, KeyError):
            pass
        number = -status if status < 0 else status - 128
        if number in set(signal.Signals) and status != INTERRUPTED:
            return _End(code=128 + number, how=f"ended by {signal.Signals(number).name}")
        return _End(code=status, how=f"exit code {status}")

    def _judge(self, end: _End, watch: Watch) -> RestartDecision | None:
        if self._asked.signals or (not end.stalled and end.code in {0, INTERRUPTED, *FINAL_CODES}):
            return None
        pulse = watch.pulse if watch.begun else None
        resumed = ((watch.begun.resumed_from if watch.begun else None) or "").rpartition("-")[2]
        death = Death(
            how=end.how,
            code=end.code,
            phase=pulse.phase if pulse else None,
            step=pulse.step if pulse else 0,
            resumed_at=int(resumed) if resumed.isdecimal() else 0,
            checkpoint=self._newest_checkpoint(),
            cut=self._cut(),
        )
        self._deaths.append(death)
        record = read_record(Path(self._begun.output_dir)) if self._begun else None
        return decide(self._deaths, record.skipped_steps if record else (), self._settings)

    def _cut(self) -> int:
        if self._begun is None:
            return 1
        try:
            found = json.loads((Path(self._begun.output_dir) / "_step_down.json").read_text(encoding="utf-8"))
            return int(found["divisor"]) if found["run_id"] == self._begun.run_id else 1
        except (OSError, ValueError, KeyError, TypeError):
            return 1  # missing, or the job itself will report the error

    def _enter(self, end: _End, watch: Watch, decision: RestartDecision | None) -> None:
        evidence = [f"amdgpu left the device core dump {name}" for name in sorted(core_dumps() - self._dumps)]
        self._ledger.add(
            "end",
            how=end.how,
            code=end.code,
            message=end.message,
            step=watch.pulse.step if watch.pulse else None,
            phase=watch.pulse.phase if watch.pulse else "start",
            evidence=evidence or None,
            decision=None if decision is None else f"{decision.action}: {decision.reason}",
            skipped_step=None if decision is None else decision.skip,
        )
        for line in evidence:
            _say(f"{line}, which it writes when it resets a GPU")
        if self._ledger.failure is not None:
            _say(f"{JOURNAL_FILE} could not be written: {self._ledger.failure.strerror}")

    def _carry_out(self, decision: RestartDecision, end: _End) -> None:
        newest = self._deaths[-1].checkpoint
        place = f"checkpoint-{newest}" if newest else "the start, because there is no checkpoint yet (see --save_steps)"
        if decision.action == "stop":
            where = f"; see {Path(self._begun.output_dir) / JOURNAL_FILE}" if self._begun else ""
            kept = f"checkpoint-{newest} is intact" if newest else "no checkpoint was written"
            _complain(f"run: stopped: {end.how}, {decision.reason}; {kept}{where}")
            return
        if decision.skip is not None:
            assert self._begun is not None  # a step was computed
            if self._begun.leads:
                skip_step(Path(self._begun.output_dir), decision.skip)
        _say(f"{end.how}; {decision.reason}; restarting in {decision.wait_seconds:.0f} s from {place}")

    def _newest_checkpoint(self) -> int:
        if self._begun is None:
            return 0
        for step, path in reversed(list_checkpoints(Path(self._begun.output_dir))):
            found = manifest.read(path)
            if isinstance(found, manifest.Manifest) and found.run_id == self._begun.run_id:
                return step
        return 0


@contextlib.contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP are recorded, if this is the main thread."""
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    numbers = (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))
    before = {number: signal.signal(number, asked.hear) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: the job must still be looked after
        print(f"{PROGRAM}: run: {one_line(line)}", flush=True)


def _complain(line: str) -> None:
    print(f"{PROGRAM}: error: {one_line(line)}", file=sys.stderr, flush=True)
