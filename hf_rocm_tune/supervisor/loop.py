"""Starts the job, watches it, and starts it again while that makes sense."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hf_rocm_tune.endings import EXIT_FILE_VARIABLE, FINAL_CODES, INTERRUPTED, PROGRAM
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.hardware.resets import core_dumps
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.redaction import one_line
from hf_rocm_tune.supervisor.child import Child
from hf_rocm_tune.supervisor.command import shown, to_start
from hf_rocm_tune.supervisor.ledger import Ledger
from hf_rocm_tune.supervisor.policy import Death, Decision, decide
from hf_rocm_tune.supervisor.settings import Settings
from hf_rocm_tune.supervisor.watch import Watch
from hf_rocm_tune.training.journal import FILE_NAME
from hf_rocm_tune.training.run import list_checkpoints, read_record, skip_step
from hf_rocm_tune.training.supervised import Begun, leave_terminal

_LOOK_SECONDS = 0.2
_SAME_PRESS_SECONDS = 1.0
# torch's agent kills its workers this long after a signal, 30 seconds unless told: a checkpoint may take longer.
_AGENT_TIMEOUT = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")


def supervise(words: Sequence[str], settings: Settings) -> int:
    """Run a training command to its end, through crashes and stalls.

    Args:
        words: the command line as the user gave it.
        settings: the limits.

    Returns:
        0 when the job is done, 130 when it was asked to end, else the code of its last end: 2 and 3 as they are, 4 for
        a stall, 128 + n for signal n.

    Raises:
        UsageError: the command cannot be supervised or started.
        StallError: a process does not end even by SIGKILL.
    """
    argv = to_start(words)
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-run-") as directory, _asked_to_end() as asked:
        return _Supervision(argv, shown(words), settings, Path(directory), asked).run()


class _Asked:
    """Signals to the supervisor: the first is passed on, whichever it is, the second Ctrl-C too, the third kills."""

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
    """How one start ended."""

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
            child = Child(self._argv, self._environment(), self._directory)
            end = self._see_through(child, watch)
            decision = self._judge(end, watch)
            self._enter(end, watch, decision)
            if decision is None:
                return self._final_code(end)
            self._carry_out(decision, end)
            if decision.action == "stop":
                return end.code
            if self._wait(decision.wait_seconds):
                _say("not started again, as asked; the same command goes on from the newest checkpoint")
                return INTERRUPTED

    # ---- one start ------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        (self._directory / "exit.json").unlink(missing_ok=True)
        name, value = _AGENT_TIMEOUT
        return {name: value, **os.environ, EXIT_FILE_VARIABLE: str(self._directory / "exit.json")}

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
                _say(f"no sign of life for {stalled:.0f} s: ending the job")
                break
        if cut_short or stalled is not None or child.poll() not in (0, INTERRUPTED):
            self._clean_up(child, self._settings.grace_seconds if stalled is not None else 0.0)
        self._look(watch)
        if stalled is not None:
            return _End(code=StallError.exit_code, how=f"no sign of life for {stalled:.0f} s", stalled=True)
        return self._ending(child.poll())

    def _clean_up(self, child: Child, grace_seconds: float) -> None:
        """Nothing of this start may live on: it would hold the card's memory and the output directory."""
        survivors = child.end(grace_seconds)
        if survivors:
            what = f"processes {survivors} of the job do not end even by SIGKILL, so they hang in the driver"
            self._ledger.add("end", how=what, code=StallError.exit_code)
            raise StallError(f"{what} and hold the GPU: restart the machine, then start the same command again")

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
            if told.get("follows"):  # a rank without our launcher lost its peer: nobody has said it yet
                _complain(str(told["message"]))
            if int(told["code"]) != 0 or status == 0 or self._asked.signals:  # else it died after it was done
                return _End(code=int(told["code"]), how=f"exit code {told['code']}", message=str(told["message"]))
        except (OSError, ValueError, KeyError):
            pass
        number = -status if status < 0 else status - 128
        if number in set(signal.Signals) and status != INTERRUPTED:
            return _End(code=128 + number, how=f"ended by {signal.Signals(number).name}")
        return _End(code=status, how=f"exit code {status}")

    # ---- between starts -------------------------------------------------------------------------------------

    def _judge(self, end: _End, watch: Watch) -> Decision | None:
        """What to do; None where the job has ended for good."""
        if self._asked.signals or (not end.stalled and end.code in {0, INTERRUPTED, *FINAL_CODES}):
            return None
        pulse = watch.pulse if watch.begun else None
        death = Death(
            how=end.how,
            code=end.code,
            phase=pulse.phase if pulse else None,
            step=pulse.step if pulse else 0,
            resumed_at=_step_of(watch.begun.resumed_from if watch.begun else None),
            checkpoint=self._newest_checkpoint(),
        )
        self._deaths.append(death)
        return decide(self._deaths, self._skipped(), self._settings)

    def _final_code(self, end: _End) -> int:
        if end.code in FINAL_CODES:
            _say(f"not started again: {end.how} is final")
        asked = self._asked.signals and end.code not in {0, *FINAL_CODES}
        return INTERRUPTED if asked else end.code

    def _enter(self, end: _End, watch: Watch, decision: Decision | None) -> None:
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
            _say(f"{line}, as it does when it resets a GPU")
        if self._ledger.failure is not None:
            _say(f"{FILE_NAME} could not be written: {self._ledger.failure.strerror}")

    def _carry_out(self, decision: Decision, end: _End) -> None:
        newest = self._deaths[-1].checkpoint
        place = f"checkpoint-{newest}" if newest else "the start, since there is no checkpoint yet (see --save_steps)"
        if decision.action == "stop":
            where = f"; see {Path(self._begun.output_dir) / FILE_NAME}" if self._begun else ""
            kept = f"checkpoint-{newest} is intact" if newest else "no checkpoint was written"
            _complain(f"run: given up: {end.how}, {decision.reason}; {kept}{where}")
            return
        if decision.skip is not None:
            assert self._begun is not None  # a step was computed
            if self._begun.leads:
                skip_step(Path(self._begun.output_dir), decision.skip)
        _say(f"{end.how}; {decision.reason}; starting again in {decision.wait_seconds:.0f} s from {place}")

    def _wait(self, seconds: float) -> bool:
        """Waits before a restart; True when the end is asked for meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._asked.signals and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return bool(self._asked.signals)

    def _newest_checkpoint(self) -> int:
        """Step of the newest checkpoint of this run that has a manifest; 0 for none. The job verifies its bytes."""
        if self._begun is None:
            return 0
        for step, path in reversed(list_checkpoints(Path(self._begun.output_dir))):
            found = manifest.read(path)
            if isinstance(found, manifest.Manifest) and found.run_id == self._begun.run_id:
                return step
        return 0

    def _skipped(self) -> tuple[int, ...]:
        record = read_record(Path(self._begun.output_dir)) if self._begun else None
        return record.skipped_steps if record else ()


@contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """Ctrl-C, SIGTERM and SIGHUP are remembered within the block, where signals can be handled at all."""
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


def _step_of(checkpoint: str | None) -> int:
    number = (checkpoint or "").rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _say(line: str) -> None:
    print(f"{PROGRAM}: run: {one_line(line)}", flush=True)


def _complain(line: str) -> None:
    print(f"{PROGRAM}: error: {one_line(line)}", file=sys.stderr, flush=True)
