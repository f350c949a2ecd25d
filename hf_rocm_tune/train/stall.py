"""The stall watchdog of a training job: time limits of each phase, and the evidence that is written after a stall.

Heartbeats and phases are those sent to the supervisor (`supervised`). The limit of a training step follows from the
duration of the last steps; phases without such a measure (the first steps, in which kernels are compiled, a new epoch,
an evaluation, a save) get a longer one.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_rocm_tune.cards.watchdog import Board, Look, Stall, Watchdog, briefly, is_lost_peer, lost_peer
from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.heartbeat import Patience, Phase, patience, touch_pulse
from hf_rocm_tune.train import report
from hf_rocm_tune.train.telemetry import clear_live_line

if TYPE_CHECKING:
    from hf_rocm_tune.train.trainer import VerifiedTransferMixin

REPORT_FILE = "stall_report.txt"

_FLOOR_SECONDS, _FACTOR = 300.0, 10.0
_PATIENT, _START = 4.0, 24.0
"""Multiples of the floor: for phases without a measure, and before training, where there are no heartbeats."""
_BEFORE_OTHERS = 0.8
"""Share of the limits of the supervisor and of the collectives, which also end a job but do not know the cause."""
_MEASURED, _ENOUGH = 50, 3
_REPORT_SECONDS, _EVIDENCE_SECONDS, _TELL_SECONDS = 5.0, 10.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that may pass without a heartbeat."""

    floor_s: float  # the least limit of a training step
    factor: float  # times the median of the last steps, if that is more
    patient_s: float  # in the first steps, at the start of an epoch, in an evaluation, a save, at the end
    start_s: float  # before training
    most_s: float  # upper bound of all limits except ``start_s``

    @classmethod
    def of(cls, setting: str, supervisor: Patience | None, *, collective_s: float | None = None) -> Limits | None:
        """The limits for a value of ``--stall_timeout``; None for no limits."""
        seconds = parse(setting)
        if seconds == 0:
            return None
        floor, factor = (_FLOOR_SECONDS, _FACTOR) if seconds is None else (seconds, 0.0)
        start, most = _START * floor, _BEFORE_OTHERS * (collective_s or float("inf"))
        if supervisor is not None:
            most = min(most, _BEFORE_OTHERS * supervisor.stall_seconds or most)
            start = min(start, _BEFORE_OTHERS * supervisor.start_seconds or start)
        return cls(floor_s=floor, factor=factor, patient_s=_PATIENT * floor, start_s=start, most_s=most)

    @property
    def tick_s(self) -> float:
        return min(max(min(self.floor_s, self.most_s) / 20, 0.05), 1.0)


def parse(setting: str) -> float | None:
    """A value of ``--stall_timeout`` in seconds; None for ``auto``."""
    if setting == "auto":
        return None
    try:
        seconds = float(setting)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--stall_timeout {setting} is not valid: give auto, a number of seconds, or 0 for never")
    return seconds


class Progress:
    """The progress of training: updated by its thread, read by the watchdog's.

    ``mark`` is called at every heartbeat with a description of the current phase.
    """

    def __init__(self, limits: Limits, mark: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._limits, self._mark, self._clock = limits, mark, clock
        self._steps: deque[float] = deque(maxlen=_MEASURED)
        self._fresh = True
        self._beats, self._since = 0, clock()
        self.step, self.phase = 0, "start"

    def beat(self, *, step: int, phase: Phase, fresh: bool = False) -> None:
        """Record a heartbeat; see `supervised.Heartbeat`."""
        now = self._clock()
        if self.phase == "step":
            self._steps.append(now - self._since)
            self._fresh = self._fresh and phase == "step"
        self._fresh = self._fresh or fresh
        self._since, self.step, self.phase = now, step, phase
        self._mark(self.where)
        self._beats += 1

    @property
    def where(self) -> str:
        """The current phase, for people."""
        places = {
            "start": "before the training",
            "step": f"in step {self.step + 1}",
            "between": f"between steps {self.step} and {self.step + 1}" if self.step else "before step 1",
            "evaluate": f"in the evaluation after step {self.step}",
            "save": f"in the checkpoint of step {self.step}",
            "end": "after the last step",
            "publish": "in the upload of the result",
        }
        return places[self.phase]

    def look(self) -> Look:
        return Look(beats=self._beats, where=self.where, limit_s=self._limit())

    def _limit(self) -> float | None:
        limits, steps = self._limits, self._steps
        if self.phase == "publish":
            return None  # an upload sends no heartbeats
        if self.phase == "start":
            return limits.start_s
        if self.phase not in ("step", "between") or self._fresh or len(steps) < _ENOUGH:
            return min(limits.patient_s, limits.most_s)
        return min(max(limits.floor_s, limits.factor * statistics.median(steps)), limits.most_s)


class StallGuard:
    """The watchdog of one job and the evidence that it writes."""

    def __init__(
        self, limits: Limits | None, board: Board | None, tell: Callable[[TuneError], None], environ: Mapping[str, str]
    ) -> None:
        self._board, self._tell, self._elsewhere = board, tell, _elsewhere(environ)
        self._trainer: VerifiedTransferMixin | None = None
        self._facts: report.RunFacts | None = None
        self._directory: Path | None = None
        self._progress: Progress | None = None
        self._watchdog: Watchdog | None = None
        if limits is not None:
            self._progress = Progress(limits, board.mark if board is not None else lambda _: None)
            self._watchdog = Watchdog(
                look=self._progress.look,
                on_suspicion=lambda: touch_pulse(environ),
                on_stall=self._leave_evidence,
                board=board,
                elsewhere=self._elsewhere,
                tick_s=limits.tick_s,
            )
            self._watchdog.start()

    def starting(self) -> None:
        """Call before a trainer is created, which sends no heartbeats."""
        self.beat(step=0, phase="start", fresh=True)

    def beat(self, *, step: int, phase: Phase, fresh: bool) -> None:
        """Record a heartbeat of the trainer; see `supervised.Heartbeat`."""
        if self._progress is not None:
            self._progress.beat(step=step, phase=phase, fresh=fresh)

    def watch(self, trainer: VerifiedTransferMixin, facts: report.RunFacts, directory: Path) -> None:
        """Call before training: from now on a stall is recorded in ``directory``, with the report of ``trainer``."""
        self._trainer, self._facts, self._directory = trainer, facts, directory

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._board is not None:
            self._board.leave()

    def lost_peer(self, error: BaseException) -> StallError:
        others = self._board.others() if self._board is not None else []
        where = self._progress.where if self._progress is not None else "in this job"
        return lost_peer(error, others, elsewhere=self._elsewhere, where=where)

    def _leave_evidence(self, stall: Stall) -> None:
        # Nothing is written to the output directory before the run owns it.
        directory = self._directory or Path(tempfile.mkdtemp(prefix="hf-rocm-tune-stall-"))
        text = directory / REPORT_FILE
        written = briefly(lambda: _write(text, stall.page), _REPORT_SECONDS) and text.exists()
        kept = f"stacks and states of all ranks are in {text}" if written else f"{text} could not be written"
        error = StallError(
            f"no progress for {stall.silent_s:.0f} s {stall.where}: {stall.cause}; {kept}. The checkpoints already "
            "written are intact: start the same command again to continue from the newest one"
        )
        briefly(lambda: self._report(stall), _EVIDENCE_SECONDS)
        briefly(clear_live_line, _TELL_SECONDS)
        briefly(lambda: self._tell(error), _TELL_SECONDS)

    def _report(self, stall: Stall) -> None:
        if self._trainer is None or self._facts is None or self._directory is None or self._progress is None:
            return
        self._trainer.transfer_report.incident(
            {
                "step": self._progress.step + (self._progress.phase == "step"),
                "stage": "progress",
                "tensor": "",
                "kind": "stall",
                "cause": stall.cause,
                "silent_seconds": stall.silent_s,
                "outcome": "stopped",
            }
        )
        content = report.build(self._trainer, self._facts, gather=False)
        try:
            report.write(content, self._directory)
        except OSError as error:
            os.write(2, f"hf-rocm-tune: {report.FILE_NAME} could not be written: {error}\n".encode())


@contextmanager
def watched(
    setting: str,
    *,
    place: Path | None,
    tell: Callable[[TuneError], None],
    collective_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[StallGuard]:
    """Run the watchdog within the block, and report a lost connection to another rank in one line."""
    limits = Limits.of(setting, patience(environ), collective_s=collective_s)
    board = Board(place, rank=int(environ.get("RANK", "0"))) if place is not None else None
    guard = StallGuard(limits, board, tell, environ)
    try:
        yield guard
    except (RuntimeError, KeyboardInterrupt) as error:
        lost = _lost_peer_in(error)
        if lost is None:
            raise
        if threading.current_thread() is threading.main_thread():
            # The launcher's SIGTERM to the remaining ranks is not a request of the user to end the run.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise guard.lost_peer(lost) from error
    finally:
        guard.close()


def _lost_peer_in(error: BaseException) -> BaseException | None:
    """The broken connection behind this error: itself, or the one that was handled when a signal arrived."""
    if is_lost_peer(error):
        return error
    during = error.__context__ if isinstance(error, KeyboardInterrupt) else None
    return during if during is not None and is_lost_peer(during) else None


def _write(file: Path, text: str) -> None:
    try:
        write_text_atomic(file, text)
    except OSError:
        file.unlink(missing_ok=True)  # the file of an earlier stall would be mistaken for this one's


def _elsewhere(environ: Mapping[str, str]) -> int:
    world = int(environ.get("WORLD_SIZE", "1"))
    return max(world - int(environ.get("LOCAL_WORLD_SIZE", str(world))), 0)
