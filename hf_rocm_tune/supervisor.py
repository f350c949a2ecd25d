"""``hf-rocm-tune run -- COMMAND``: watches a training job and restarts it from its newest verified checkpoint.

The command runs in its own session: Ctrl-C in the terminal reaches only the supervisor, which passes it on once. All
processes of an attempt are found by the unique value of `heartbeat.VARIABLE` in their environment, and ended with it.
Not covered: a process that hangs in the driver, which no signal ends; it is named. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple, get_args

import psutil

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.errors import CommandParser, OutOfMemoryError, StallError, UsageError, checked
from hf_rocm_tune.exits import ENDING_SIGNALS, EXIT_FILE_VARIABLE, FINAL_CODES, INTERRUPTED, PROGRAM, handling
from hf_rocm_tune.machine.gpus import core_dumps
from hf_rocm_tune.redaction import print_line, redact
from hf_rocm_tune.survive import heartbeat, manifest
from hf_rocm_tune.survive.heartbeat import Begun, Phase, Pulse, Supervised, phase_name
from hf_rocm_tune.survive.run_directory import list_checkpoints, read_record, skip_step

ENTRIES = frozenset(get_args(Method))
"""Training modules of this package, which are also verbs."""
DEATHS_TO_SKIP, DEATHS_TO_STOP, EXCEPTIONS_TO_STOP = 2, 4, 2

_PACKAGE = "hf_rocm_tune"
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, _SAME_PRESS_SECONDS = 0.2, 1.0, 1.0
_KILL_SECONDS = 30.0
"""How long SIGKILL may take: the kernel first releases the process's resources."""
_LONGEST_WAIT_SECONDS = 300.0
# torch's agent kills its workers this long after a signal, 30 seconds unless told: a checkpoint may take longer.
_AGENT_TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of ``hf-rocm-tune run``; their meanings are in `FLAGS`."""

    max_restarts: int = 8
    max_skips: int = 3
    stall_seconds: float = 1800.0
    start_seconds: float = 7200.0
    backoff_seconds: float = 5.0
    grace_seconds: float = 60.0


FLAGS = {
    "max_restarts": "restarts without a new checkpoint between them",
    "max_skips": "optimizer steps that may be skipped because the run dies in them",
    "stall_seconds": "without a heartbeat after which the job is restarted; 0: never",
    "start_seconds": "the same before the first step",
    "backoff_seconds": "before the first restart, doubled for each further one",
    "grace_seconds": "from SIGTERM to SIGKILL for a stalled job",
}


def main(argv: Sequence[str]) -> int:
    """``hf-rocm-tune run``."""
    what = "supervise a training command: after a crash or a stall it goes on from its newest checkpoint"
    parser = CommandParser(prog=f"{PROGRAM} run", description=what, usage="%(prog)s [flags] -- COMMAND ...")
    for name, default in vars(Settings()).items():
        kind = checked(type(default), lambda value: value >= 0, "0 or more")
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{FLAGS[name]} (default: {default:g})")
    split = list(argv).index("--") if "--" in argv else len(argv)
    wanted, stray = parser.parse_known_args(argv[:split])
    if stray or split == len(argv):
        got = f"; got {stray[0]}" if stray else ""
        raise UsageError(f"give the training command after `--`: `{PROGRAM} run -- accelerate launch ...`{got}")
    return supervise(argv[split + 1 :], Settings(**vars(wanted)))


def supervise(words: Sequence[str], settings: Settings) -> int:
    """Run a training command to its end, through crashes and stalls."""
    argv = to_start(words)
    with TemporaryDirectory(prefix=f"{PROGRAM}-run-") as directory, _asked_to_end() as asked:
        return _Supervision(argv, settings, Path(directory), asked).run(shown(words))


def to_start(words: Sequence[str]) -> list[str]:
    """The command line to start for the user's one, which must be a training job of this package.

    accelerate's launcher of a single process does not forward signals and dies before its job, so ours wraps it.
    """
    program, rest = os.path.basename(words[0]) if words else "", list(words[1:])
    modules = [module for flag, module in pairwise(words) if flag in ("-m", "--module")]
    trains = any(module.partition(".")[::2] in {(_PACKAGE, entry) for entry in ENTRIES} for module in modules)
    verb = next((after for module, after in pairwise(words) if module == _PACKAGE), "") if _PACKAGE in modules else ""
    launcher = [sys.executable, "-m", f"{_PACKAGE}.launch"]
    if program == PROGRAM and rest[:1] and rest[0] in ENTRIES:
        return [sys.executable, "-m", _PACKAGE, *rest]
    if trains and (program == "accelerate-launch" or (program == "accelerate" and rest[:1] == ["launch"])):
        return [*launcher, *rest[program == "accelerate" :]]
    if (program == "torchrun" and trains) or (program.startswith("python") and (trains or verb in ENTRIES)):
        through = modules[0] == "accelerate.commands.launch"
        return [*launcher, *words[words.index(modules[0]) + 1 :]] if through else list(words)
    raise UsageError(
        "run supervises `accelerate launch ... -m hf_rocm_tune.sft ...`, `hf-rocm-tune sft ...`, `torchrun ... -m "
        "hf_rocm_tune.sft ...` or `python -m hf_rocm_tune.sft ...` (or another training verb); got: "
        f"{(shown(words) or 'nothing')[:200]}"
    )


def shown(words: Sequence[str]) -> str:
    """The command line without secrets, for messages."""
    return redact(shlex.join(words))


# ---- what to do after a death -------------------------------------------------------------------------------


_AT_THE_START = phase_name("start", 0)


@dataclass(frozen=True, kw_only=True)
class Death:
    """How an attempt ended that should have continued."""

    code: int  # the supervisor's exit code for it
    phase: Phase | None  # at the last heartbeat; None before the first one
    step: int  # optimizer steps done by then
    resumed_at: int  # step of the checkpoint from which this attempt resumed; 0 from the start
    checkpoint: int  # step of the newest verified checkpoint now; 0 for none

    @property
    def in_step(self) -> int | None:
        """The current optimizer step, or the last one, whose kernels may still have been running."""
        if self.phase == "step":
            return self.step + 1
        return self.step if self.phase == "between" and self.step != self.resumed_at else None

    @property
    def suspect(self) -> int | None:
        """The optimizer step that may be the cause; after running out of memory the next attempt divides it."""
        return None if self.code == OutOfMemoryError.exit_code else self.in_step

    @property
    def where(self) -> str:
        if self.in_step is not None:
            return f"in step {self.in_step}"
        return phase_name(None if self.phase == "between" else self.phase, self.step)


class RestartDecision(NamedTuple):
    """What to do now, and why."""

    reason: str
    restart: bool = False
    skip: int | None = None  # an optimizer step to skip from now on
    wait_seconds: float = 0.0  # before the restart


def decide(deaths: Sequence[Death], skipped: Collection[int], settings: Settings) -> RestartDecision:
    """The decision after the last of these deaths (oldest first). Codes 0, 2, 3 and 130 are not deaths.

    Rules, in this order: died in the upload: stop, the result is complete; the second exception (code 1) before the
    first step: stop; the fourth death at the same place, or more restarts without a new checkpoint than allowed: stop;
    the second death at the same step: skip that step from now on. Only deaths since the newest checkpoint count.
    """
    last, where = deaths[-1], deaths[-1].where
    if last.phase == "publish":
        return RestartDecision("the result is complete on disk, only its upload failed")
    recent = [death for death in deaths if death.checkpoint == last.checkpoint]
    here = sum(death.where == where for death in recent)
    raised = sum(death.code == 1 and death.where == _AT_THE_START for death in recent)
    if here >= DEATHS_TO_STOP or raised >= EXCEPTIONS_TO_STOP:
        return RestartDecision(f"died {here} times {where}{', although it is skipped' * (last.suspect in skipped)}")
    if len(recent) > settings.max_restarts:
        return RestartDecision(f"{settings.max_restarts} restarts without a new checkpoint")
    wait = min(settings.backoff_seconds * 2 ** (len(recent) - 1), _LONGEST_WAIT_SECONDS)
    if here < DEATHS_TO_SKIP or last.suspect is None or last.suspect in skipped:
        return RestartDecision(f"died {where}", restart=True, wait_seconds=wait)
    if len(skipped) >= settings.max_skips:
        steps = ", ".join(map(str, sorted(skipped)))
        why = f"steps {steps} are skipped already" if skipped else "no step may be skipped"
        return RestartDecision(f"died {here} times {where}, and {why} (--max_skips)")
    reason = f"died {here} times {where}: the step is skipped, its batches are not trained on"
    return RestartDecision(reason, restart=True, skip=last.suspect, wait_seconds=wait)


# ---- one attempt: its processes, heartbeats and journal ------------------------------------------------


class Child:
    """A started command; ``mark`` is in the environment of all its processes."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], mark: str) -> None:
        self._mark, environ = mark, {**environ, heartbeat.VARIABLE: mark}
        try:
            self._process = Popen(list(argv), env=environ, start_new_session=True, stdin=DEVNULL)
        except OSError as error:
            raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error
        self.poll = self._process.poll  # the exit code, or minus the signal's number; None while it runs

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self, grace_seconds: float) -> list[int]:
        """SIGTERM, then SIGKILL to its remaining processes. Returns the ids of processes that survived."""
        self.send(signal.SIGTERM)
        with suppress(TimeoutExpired):
            self._process.wait(grace_seconds)
        for process in (left := self._left()):
            with suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := self._left() if left else []) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.poll()
        return [process.pid for process in left]

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(heartbeat.VARIABLE) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


class Watch:
    """Progress of one attempt, from the files that it writes into ``directory``; those of an earlier one are deleted.

    Time counts only while this process looks: a job may be stopped as a whole, with its supervisor.
    """

    def __init__(self, directory: Path, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._settings, self._clock = directory, settings, clock
        for name in (heartbeat.PULSE_FILE, heartbeat.BEGUN_FILE):
            (directory / name).unlink(missing_ok=True)
        self.begun: Begun | None = None
        self.pulse: Pulse | None = None
        self._stamp = 0
        self._silent, self._looked = 0.0, clock()

    def look(self) -> None:
        self.begun = self.begun or heartbeat.read_begun(self._directory)
        passed, self._looked = self._clock() - self._looked, self._clock()
        self._silent += min(passed, _LONGEST_LOOK_SECONDS)
        pulse, stamp = heartbeat.read_pulse(self._directory / heartbeat.PULSE_FILE)
        if pulse is not None and (pulse, stamp) != (self.pulse, self._stamp):
            self.pulse, self._stamp, self._silent = pulse, stamp, 0.0

    def silence(self) -> float | None:
        """Seconds without a heartbeat if above the limit; else None."""
        phase = self.pulse.phase if self.pulse is not None else "start"
        limit = self._settings.start_seconds if phase == "start" else self._settings.stall_seconds
        # An upload has no heartbeats.
        return self._silent if limit and self._silent > limit and phase != "publish" else None


class Ledger:
    """The journal, kept in memory until the job has begun, because a refused job must not write into the directory of
    another run. Of several machines the supervisor of rank 0 writes.
    """

    def __init__(self) -> None:
        self._begun: Begun | None = None
        self.failure: OSError | None = None  # of the last write
        self._waiting: list[dict[str, Any]] = []

    def add(self, event: str, **details: Any) -> None:
        """Add an entry, without None values."""
        told = {key: value for key, value in details.items() if value is not None}
        self._waiting.append({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **told})
        self._write()

    @property
    def begun(self) -> Begun | None:
        return self._begun

    @begun.setter
    def begun(self, begun: Begun) -> None:
        self._begun = begun
        self._write()

    def _write(self) -> None:
        self.failure = None
        try:
            while self._begun is not None and self._waiting:
                if self._begun.leads:
                    heartbeat.enter(Path(self._begun.output_dir), {"run_id": self._begun.run_id, **self._waiting[0]})
                self._waiting.pop(0)
        except OSError as error:
            self.failure = error


# ---- all attempts ---------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """How one attempt ended; ``may_restart``: not by its own decision or a request."""

    code: int
    how: str
    message: str | None
    may_restart: bool


class _Supervision:
    def __init__(self, argv: list[str], settings: Settings, directory: Path, asked: list[int]) -> None:
        self._argv, self._settings, self._directory, self._asked = argv, settings, directory, asked
        self._ledger = Ledger()
        self._deaths: list[Death] = []

    def run(self, command: str) -> int:
        while True:
            _say(f"start {len(self._deaths) + 1}: {command}")
            dumps = core_dumps()
            watch = Watch(self._directory, self._settings)
            end = self._see_through(watch)
            decision = self._judge(end, watch) if end.may_restart else None
            self._enter(end, watch, decision, sorted(core_dumps() - dumps))
            if decision is None:
                if end.code in FINAL_CODES:
                    _say(f"not restarted: {end.how} is final")
                return INTERRUPTED if self._asked and end.code not in {0, *FINAL_CODES} else end.code
            self._carry_out(decision, end)
            if not decision.restart:
                return end.code
            deadline = time.monotonic() + decision.wait_seconds
            while not self._asked and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if self._asked:
                _say("not restarted, as requested; the same command continues from the newest checkpoint")
                return INTERRUPTED

    def _see_through(self, watch: Watch) -> _End:
        """Start the job and wait for its end, or end it where it stalls or the user insists."""
        record, limits = self._directory / "exit.json", self._settings
        record.unlink(missing_ok=True)
        before = self._ledger.begun.run_id if self._ledger.begun else None
        told = Supervised(str(self._directory), limits.start_seconds, limits.stall_seconds, before)
        child = Child(self._argv, {**_AGENT_TIMEOUT, **os.environ, EXIT_FILE_VARIABLE: str(record)}, told.to_json())
        passed_on, stalled = 0, None
        while child.poll() is None and stalled is None and passed_on <= 2:
            time.sleep(_LOOK_SECONDS)
            self._look(watch)
            if len(self._asked) > passed_on:
                passed_on += 1
                if passed_on <= 2:
                    child.send(self._asked[passed_on - 1])
            elif (stalled := watch.silence()) is not None:
                _say(f"no heartbeat for {stalled:.0f} s: ending the job")
        # All processes of this attempt, which would hold the card's memory and the output directory.
        grace_seconds = limits.grace_seconds if stalled is not None else 0.0
        if child.poll() not in (0, INTERRUPTED) and (survivors := child.end(grace_seconds)):
            what = f"processes {survivors} of the job survive SIGKILL, so they hang in the driver"
            self._ledger.add("end", how=what, code=StallError.exit_code)
            raise StallError(f"{what} and hold the GPU: restart the machine, then repeat the command")
        self._look(watch)
        if stalled is not None:
            return _End(StallError.exit_code, f"no heartbeat for {stalled:.0f} s", None, not self._asked)
        status = child.poll()
        assert status is not None
        return self._ending(status, record)

    def _look(self, watch: Watch) -> None:
        known = watch.begun
        watch.look()
        if (begun := watch.begun) is not None and known is None:
            self._ledger.begun = begun
            self._ledger.add("start", start=len(self._deaths) + 1, resumed_from=begun.resumed_from or "the start")

    def _ending(self, status: int, record: Path) -> _End:
        number, message = -status if status < 0 else status - 128, None
        signalled = number in set(signal.Signals) and status != INTERRUPTED
        code, how = (128 + number, f"ended by {signal.Signals(number).name}") if signalled else (status, "")
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(record.read_text(encoding="utf-8"))
            if told.get("follows"):  # a rank without our launcher lost its peer, which was not printed yet
                _complain(str(told["message"]))
            if int(told["code"]) != 0 or status == 0 or self._asked:  # else it died after success
                code, how, message = int(told["code"]), "", str(told["message"])
        may_restart = not self._asked and code not in {0, INTERRUPTED, *FINAL_CODES}
        return _End(code, how or f"exit code {code}", message, may_restart)

    def _judge(self, end: _End, watch: Watch) -> RestartDecision:
        pulse, resumed = (watch.pulse, watch.begun.resumed_from or "") if watch.begun else (None, "")
        phase, step = (pulse.phase, pulse.step) if pulse else (None, 0)
        at, newest, record = resumed.rpartition("-")[2], 0, None
        if (begun := self._ledger.begun) is not None:
            record = read_record(Path(begun.output_dir))
            for saved, path in list_checkpoints(Path(begun.output_dir)):
                newest = saved if manifest.run_of(path) == begun.run_id else newest
        resumed_at = int(at) if at.isdecimal() else 0
        self._deaths.append(Death(code=end.code, phase=phase, step=step, resumed_at=resumed_at, checkpoint=newest))
        return decide(self._deaths, record.skipped_steps if record else (), self._settings)

    def _enter(self, end: _End, watch: Watch, decision: RestartDecision | None, dumps: Sequence[str]) -> None:
        evidence = [f"amdgpu left the device core dump {name}" for name in dumps]
        self._ledger.add(
            "end",
            how=end.how,
            code=end.code,
            message=end.message,
            evidence=evidence or None,
            step=watch.pulse.step if watch.pulse else None,
            phase=watch.pulse.phase if watch.pulse else "start",
            decision=f"{'restart' if decision.restart else 'stop'}: {decision.reason}" if decision else None,
            skipped_step=decision.skip if decision else None,
        )
        for line in evidence:
            _say(f"{line}, which it writes when it resets a GPU")
        if self._ledger.failure is not None:
            _say(f"{heartbeat.JOURNAL_FILE} could not be written: {self._ledger.failure.strerror}")

    def _carry_out(self, decision: RestartDecision, end: _End) -> None:
        newest, begun = self._deaths[-1].checkpoint, self._ledger.begun
        if not decision.restart:
            where = f"; see {Path(begun.output_dir) / heartbeat.JOURNAL_FILE}" if begun else ""
            kept = f"checkpoint-{newest} is intact" if newest else "no checkpoint was written"
            _complain(f"run: stopped: {end.how}, {decision.reason}; {kept}{where}")
            return
        if decision.skip is not None and begun is not None and begun.leads:
            skip_step(Path(begun.output_dir), decision.skip)
        onward = (
            f"checkpoint-{newest}" if newest else "the start, because there is no checkpoint yet (see --save_steps)"
        )
        _say(f"{end.how}; {decision.reason}; restarting in {decision.wait_seconds:.0f} s from {onward}")


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """The signals to the supervisor within the block: the first one and further Ctrl-Cs. Of these the first two are
    passed on, the third kills."""
    asked: list[int] = []
    last = -_SAME_PRESS_SECONDS

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if not asked or (number == signal.SIGINT and now - last > _SAME_PRESS_SECONDS):
            asked.append(number)
            last = now

    with handling(ENDING_SIGNALS, hear):
        yield asked


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it, or its disk is full: the job must still be looked after
        print_line(f"{PROGRAM}: run: {line}")


def _complain(line: str) -> None:
    print_line(f"{PROGRAM}: error: {line}", sys.stderr)
