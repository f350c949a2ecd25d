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
from dataclasses import dataclass, field, fields
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
from hf_rocm_tune.lifecycle import heartbeat
from hf_rocm_tune.lifecycle.exits import ENDING_SIGNALS, EXIT_FILE_VARIABLE, FINAL_CODES, INTERRUPTED, PROGRAM, handling
from hf_rocm_tune.lifecycle.heartbeat import Begun, Phase, Pulse, Supervised, phase_name
from hf_rocm_tune.redaction import print_line, redact
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.run_directory import list_checkpoints, read_record, skip_step

ENTRIES = frozenset(get_args(Method))
"""Training modules of this package, which are also verbs."""
DEATHS_TO_SKIP = 2
DEATHS_TO_STOP = 4
EXCEPTIONS_TO_STOP = 2

_PACKAGE = "hf_rocm_tune"
_POLL_SECONDS = 0.2
_LONGEST_POLL_SECONDS = 1.0
_KILL_SECONDS = 30.0
"""How long SIGKILL may take: the kernel first releases the process's resources."""
_LONGEST_WAIT_SECONDS = 300.0
# torch's agent kills its workers this long after a signal, 30 seconds unless told: a checkpoint may take longer.
_AGENT_TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


def _flag(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": f"{meaning} (default: {default:g})"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The flags of ``hf-rocm-tune run``."""

    max_restarts: int = _flag(8, "give up after this many restarts without a new checkpoint between them")
    max_skips: int = _flag(3, "skip at most this many optimizer steps in which the run dies again and again")
    stall_seconds: float = _flag(1800.0, "restart the job after this many seconds without a heartbeat; 0: never")
    start_seconds: float = _flag(7200.0, "restart it after this many seconds without one before the first step")
    backoff_seconds: float = _flag(
        5.0, "wait this long before the first restart, and twice as long before each further one"
    )
    grace_seconds: float = _flag(60.0, "give a stalled job this many seconds between SIGTERM and SIGKILL")


def main(argv: Sequence[str]) -> int:
    """``hf-rocm-tune run``."""
    what = "supervise a training command: after a crash or a stall it goes on from its newest checkpoint"
    parser = CommandParser(prog=f"{PROGRAM} run", description=what, usage="%(prog)s [flags] -- COMMAND ...")
    for limit in fields(Limits):
        kind = checked(type(limit.default), lambda value: value >= 0, "0 or more")
        parser.add_argument(f"--{limit.name}", type=kind, default=limit.default, help=limit.metadata["help"])
    split = list(argv).index("--") if "--" in argv else len(argv)
    wanted, stray = parser.parse_known_args(argv[:split])
    if stray or split == len(argv):
        got = f"; got {stray[0]}" if stray else ""
        raise UsageError(f"give the training command after `--`: `{PROGRAM} run -- accelerate launch ...`{got}")
    return supervise(argv[split + 1 :], Limits(**vars(wanted)))


def supervise(words: Sequence[str], settings: Limits) -> int:
    """Run a training command to its end, through crashes and stalls."""
    argv = to_start(words)
    with TemporaryDirectory(prefix=f"{PROGRAM}-run-") as directory, _asked_to_end() as asked:
        return _Supervision(argv, settings, Path(directory), asked).run(redact(shlex.join(words)))


def to_start(words: Sequence[str]) -> list[str]:
    """The command line to start for the user's one, which must be a training job of this package.

    accelerate's launcher of a single process does not forward signals and dies before its job, so ours wraps it.
    """
    program = os.path.basename(words[0]) if words else ""
    rest = list(words[1:])
    modules = {module for flag, module in pairwise(words) if flag in ("-m", "--module")}
    if program == PROGRAM and rest[:1] and rest[0] in ENTRIES:
        return [sys.executable, "-m", _PACKAGE, *rest]
    if not modules.isdisjoint(f"{_PACKAGE}.{entry}" for entry in ENTRIES):
        if program == "accelerate" and rest[:1] == ["launch"]:
            return [sys.executable, "-m", f"{_PACKAGE}.lifecycle.launch", *rest[1:]]
        if program == "torchrun" or program.startswith("python"):
            return list(words)
    raise UsageError(
        "run supervises `accelerate launch ... -m hf_rocm_tune.sft ...`, `hf-rocm-tune sft ...`, `torchrun ... -m "
        "hf_rocm_tune.sft ...` or `python -m hf_rocm_tune.sft ...` (or another training verb); got: "
        f"{redact(shlex.join(words))[:200] or 'nothing'}"
    )


# ---- what to do after a death -------------------------------------------------------------------------------


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
        if self.phase == "between" and self.step != self.resumed_at:
            return self.step
        return None

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


def decide(deaths: Sequence[Death], skipped: Collection[int], settings: Limits) -> RestartDecision:
    """The decision after the last of these deaths (oldest first). Codes 0, 2, 3 and 130 are not deaths.

    Rules, in this order: died in the upload: stop, the result is complete; the second exception (code 1) before the
    first step: stop; the fourth death at the same place, or more restarts without a new checkpoint than allowed: stop;
    the second death at the same step: skip that step from now on. Only deaths since the newest checkpoint count.
    """
    last = deaths[-1]
    where = last.where
    if last.phase == "publish":
        return RestartDecision("the result is complete on disk, only its upload failed")
    recent = [death for death in deaths if death.checkpoint == last.checkpoint]
    here = sum(death.where == where for death in recent)
    raised = sum(death.code == 1 and death.where == phase_name("start", 0) for death in recent)
    # After running out of memory the next attempt divides the step.
    suspect = None if last.code == OutOfMemoryError.exit_code else last.in_step
    if here >= DEATHS_TO_STOP or raised >= EXCEPTIONS_TO_STOP:
        reason = f"died {here} times {where}"
        if suspect in skipped:
            reason += ", although it is skipped"
        return RestartDecision(reason)
    if len(recent) > settings.max_restarts:
        return RestartDecision(f"{settings.max_restarts} restarts without a new checkpoint")
    wait = min(settings.backoff_seconds * 2 ** (len(recent) - 1), _LONGEST_WAIT_SECONDS)
    if here < DEATHS_TO_SKIP or suspect is None or suspect in skipped:
        return RestartDecision(f"died {where}", restart=True, wait_seconds=wait)
    if len(skipped) >= settings.max_skips:
        return RestartDecision(f"died {here} times {where}; steps skipped already: {len(skipped)} (--max_skips)")
    reason = f"died {here} times {where}: the step is skipped, its batches are not trained on"
    return RestartDecision(reason, restart=True, skip=suspect, wait_seconds=wait)


# ---- one attempt: its processes, heartbeats and journal ------------------------------------------------


def start(argv: Sequence[str], environ: Mapping[str, str], mark: str) -> Popen[bytes]:
    """Start a command; ``mark`` is in the environment of all its processes."""
    try:
        return Popen(list(argv), env={**environ, heartbeat.VARIABLE: mark}, start_new_session=True, stdin=DEVNULL)
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error


def end_all(process: Popen[bytes], mark: str, grace_seconds: float) -> list[int]:
    """SIGTERM, then SIGKILL to all processes with this mark. Returns the ids of those that survived."""
    process.terminate()
    with suppress(TimeoutExpired):
        process.wait(grace_seconds)
    left = _marked(mark)
    for survivor in left:
        with suppress(psutil.Error):
            survivor.kill()
    deadline = time.monotonic() + _KILL_SECONDS
    while left:
        left = _marked(mark)
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    with suppress(TimeoutExpired):
        process.wait(0 if left else _KILL_SECONDS)  # one that is about to end has no mark any more
    return [survivor.pid for survivor in left]


def _marked(mark: str) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(heartbeat.VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
    return marked


class PulseWatch:
    """Progress of one attempt, from the files that it writes into ``directory``; those of an earlier one are deleted.

    Time counts only while this process looks: a job may be stopped as a whole, with its supervisor.
    """

    def __init__(self, directory: Path, settings: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._settings = settings
        self._clock = clock
        for name in (heartbeat.PULSE_FILE, heartbeat.BEGUN_FILE):
            (directory / name).unlink(missing_ok=True)
        self.begun: Begun | None = None
        self.pulse: Pulse | None = None
        self._silent = 0.0
        self._polled = clock()

    def poll(self) -> None:
        self.begun = self.begun or heartbeat.read_begun(self._directory)
        passed = self._clock() - self._polled
        self._polled = self._clock()
        self._silent += min(passed, _LONGEST_POLL_SECONDS)
        pulse = heartbeat.read_pulse(self._directory)
        if pulse not in (None, self.pulse):
            self.pulse = pulse
            self._silent = 0.0

    def silence(self) -> float | None:
        """Seconds without a heartbeat if above the limit; else None."""
        phase = self.pulse.phase if self.pulse is not None else "start"
        if phase == "publish":  # an upload has no heartbeats
            return None
        limit = self._settings.start_seconds if phase == "start" else self._settings.stall_seconds
        if limit and self._silent > limit:
            return self._silent
        return None


# ---- all attempts ---------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """How one attempt ended."""

    code: int
    how: str
    message: str | None = None


class _Supervision:
    def __init__(self, argv: list[str], settings: Limits, directory: Path, asked: list[int]) -> None:
        self._argv = argv
        self._settings = settings
        self._directory = directory
        self._asked = asked
        self._begun: Begun | None = None  # the last attempt that has
        self._deaths: list[Death] = []

    def run(self, command: str) -> int:
        while True:
            _say(f"start {len(self._deaths) + 1}: {command}")
            watch = PulseWatch(self._directory, self._settings)
            end = self._see_through(watch)
            is_death = not self._asked and end.code not in {0, INTERRUPTED, *FINAL_CODES}
            decision = self._decide(end.code, watch.pulse) if is_death else None
            self._enter_end(end, watch.pulse, decision)
            if decision is None:
                if end.code in FINAL_CODES:
                    _say(f"not restarted: {end.how} is final")
                elif self._asked and end.code != 0:
                    return INTERRUPTED
                return end.code
            newest = self._deaths[-1].checkpoint
            begun = self._begun
            if not decision.restart:
                kept = f"checkpoint-{newest} is intact" if newest else "no checkpoint was written"
                where = f"; see {Path(begun.output_dir) / heartbeat.JOURNAL_FILE}" if begun else ""
                _complain(f"run: stopped: {end.how}, {decision.reason}; {kept}{where}")
                return end.code
            if decision.skip is not None and begun is not None:
                skip_step(Path(begun.output_dir), decision.skip)
            onward = f"checkpoint-{newest}" if newest else "the start: there is no checkpoint yet (see --save_steps)"
            _say(f"{end.how}; {decision.reason}; restarting in {decision.wait_seconds:.0f} s from {onward}")
            deadline = time.monotonic() + decision.wait_seconds
            while not self._asked and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if self._asked:
                _say("stopped on request; rerun the same command to resume from the latest checkpoint")
                return INTERRUPTED

    def _see_through(self, watch: PulseWatch) -> _End:
        """Start the job and wait for its end, or end it where it stalls or the user insists."""
        record = self._directory / "exit.json"
        limits = self._settings
        stalled = None
        passed_on = 0
        record.unlink(missing_ok=True)
        before = self._begun.run_id if self._begun else None
        mark = Supervised(str(self._directory), limits.start_seconds, limits.stall_seconds, before).to_json()
        process = start(self._argv, {**_AGENT_TIMEOUT, **os.environ, EXIT_FILE_VARIABLE: str(record)}, mark)
        while process.poll() is None and stalled is None and passed_on <= 2:
            time.sleep(_POLL_SECONDS)
            self._poll(watch)
            if len(self._asked) > passed_on:
                passed_on += 1
                if passed_on <= 2:
                    process.send_signal(self._asked[passed_on - 1])
            else:
                stalled = watch.silence()
                if stalled is not None:
                    _say(f"no heartbeat for {stalled:.0f} s: ending the job")
        if process.poll() not in (0, INTERRUPTED):
            # All processes of this attempt, which would hold the card's memory and the output directory.
            grace_seconds = limits.grace_seconds if stalled is not None else 0.0
            survivors = end_all(process, mark, grace_seconds)
            if survivors:
                what = f"processes {survivors} of the job survive SIGKILL, so they hang in the driver"
                self._enter("end", how=what, code=StallError.exit_code)
                raise StallError(f"{what} and hold the GPU: restart the machine, then repeat the command")
        self._poll(watch)
        if stalled is not None:
            return _End(StallError.exit_code, f"no heartbeat for {stalled:.0f} s")
        return self._ending(process.wait(), record)

    def _poll(self, watch: PulseWatch) -> None:
        known = watch.begun
        watch.poll()
        begun = watch.begun
        if begun is not None and known is None:
            self._begun = begun
            self._enter("start", start=len(self._deaths) + 1, resumed_from=begun.resumed_from or "the start")

    def _enter_end(self, end: _End, pulse: Pulse | None, decision: RestartDecision | None) -> None:
        """Add to the journal how an attempt has ended, and what is done next."""
        details: dict[str, Any] = {"how": end.how, "code": end.code, "message": end.message}
        if pulse is None:
            details["phase"] = "start"
        else:
            details["step"] = pulse.step
            details["phase"] = pulse.phase
        if decision is not None:
            action = "restart" if decision.restart else "stop"
            details["decision"] = f"{action}: {decision.reason}"
            details["skipped_step"] = decision.skip
        self._enter("end", **details)

    def _enter(self, event: str, **details: Any) -> None:
        """Add to the journal what is not None, once the run has begun: a refused job is in another run's directory."""
        if self._begun is None:
            return
        known = {key: value for key, value in details.items() if value is not None}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            entry = {"run_id": self._begun.run_id, "time": now, "event": event, **known}
            heartbeat.enter(Path(self._begun.output_dir), entry)
        except OSError as error:
            _say(f"{heartbeat.JOURNAL_FILE} could not be written: {error.strerror}")

    def _ending(self, status: int, record: Path) -> _End:
        with suppress(OSError, ValueError, KeyError):
            recorded = json.loads(record.read_text(encoding="utf-8"))
            if recorded.get("follows"):  # a rank without our launcher lost its peer, which was not printed yet
                _complain(str(recorded["message"]))
            if int(recorded["code"]) != 0 or status == 0 or self._asked:  # else it died after success
                return _End(int(recorded["code"]), f"exit code {recorded['code']}", str(recorded["message"]))
        number = -status if status < 0 else status - 128
        if number in set(signal.Signals) and status != INTERRUPTED:
            return _End(128 + number, f"ended by {signal.Signals(number).name}")
        return _End(status, f"exit code {status}")

    def _decide(self, code: int, pulse: Pulse | None) -> RestartDecision:
        skipped: Collection[int] = ()
        newest = 0
        resumed_at = 0
        begun = self._begun
        if begun is not None:
            directory = Path(begun.output_dir)
            record = read_record(directory)
            if record:
                skipped = record.skipped_steps
            for saved, path in list_checkpoints(directory):
                if manifest.run_of(path) == begun.run_id:
                    newest = saved
            number = (begun.resumed_from or "").rpartition("-")[2]  # of ``checkpoint-N``
            if number.isdecimal():
                resumed_at = int(number)
        step, phase, _ = pulse or (0, None, 0)
        self._deaths.append(Death(code=code, phase=phase, step=step, resumed_at=resumed_at, checkpoint=newest))
        return decide(self._deaths, skipped, self._settings)


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """The signals to the supervisor within the block: the first one and further Ctrl-Cs. Of these the first two are
    passed on, the third kills."""
    asked: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        if not asked or number == signal.SIGINT:
            asked.append(number)

    with handling(ENDING_SIGNALS, hear):
        yield asked


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it, or its disk is full: the job must still be looked after
        print_line(f"{PROGRAM}: run: {line}")


def _complain(line: str) -> None:
    print_line(f"{PROGRAM}: error: {line}", sys.stderr)
