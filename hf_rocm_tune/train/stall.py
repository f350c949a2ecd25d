"""The stall watchdog of a training job: time limits of each phase, and the evidence that is written after a stall.

Heartbeats and phases are those sent to the supervisor (`survive.heartbeat`). The limit of a training step follows from
the duration of the last steps; phases without such a measure (the first steps, in which kernels are compiled, a new
epoch, an evaluation, a save) get a longer one.
"""

from __future__ import annotations

import os
import re
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

import torch.distributed as dist

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.heartbeat import Phase, Supervised, touch_pulse
from hf_rocm_tune.survive.watchdog import Board, Watchdog, briefly
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
_BRIEFLY_SECONDS = 5.0
_INTACT = "The checkpoints already written are intact: start the same command again to continue from the newest one"

# Only the text distinguishes gloo's failures from bugs: they are plain RuntimeError (torch 2.13), and the messages of
# its transport begin with the source file. RCCL/NCCL and the store raise types of their own.
_GLOO = re.compile(r"gloo/transport/|connection (closed|reset) by peer|timed out waiting \d+ms", re.IGNORECASE)
_NCCL = re.compile(r"remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted|timeout", re.I)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that may pass without a heartbeat."""

    floor_s: float  # the least limit of a training step
    factor: float  # times the median of the last steps, if that is more
    patient_s: float  # in the first steps, at the start of an epoch, in an evaluation, a save, at the end
    start_s: float  # before training
    most_s: float  # upper bound of all limits except ``start_s``

    @classmethod
    def of(cls, setting: str, supervisor: Supervised | None, *, collective_s: float | None = None) -> Limits | None:
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


class TrainingProgress:
    """The progress of training: updated by its thread, read by the watchdog's; see `Watchdog`."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock = limits, clock
        self._steps: deque[float] = deque(maxlen=_MEASURED)
        self._fresh = True
        self.beats, self._since = 0, clock()
        self.step, self.phase = 0, "start"

    def beat(self, *, step: int, phase: Phase, fresh: bool = False) -> None:
        """Record a heartbeat; see `Heartbeat.beat`."""
        now = self._clock()
        if self.phase == "step":
            self._steps.append(now - self._since)
            self._fresh = self._fresh and phase == "step"
        self._fresh = self._fresh or fresh
        self._since, self.step, self.phase = now, step, phase
        self.beats += 1

    @property
    def where(self) -> str:
        """The current phase, for people."""
        return {
            "start": "before the training",
            "step": f"in step {self.step + 1}",
            "between": f"between steps {self.step} and {self.step + 1}" if self.step else "before step 1",
            "evaluate": f"in the evaluation after step {self.step}",
            "save": f"in the checkpoint of step {self.step}",
            "end": "after the last step",
            "publish": "in the upload of the result",
        }[self.phase]

    @property
    def limit_s(self) -> float | None:
        limits, steps = self._limits, list(self._steps)
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
        self._board, self._tell, self._environ = board, tell, environ
        self._running: tuple[VerifiedTransferMixin, report.RunFacts, Path] | None = None
        self._progress: TrainingProgress | None = None
        self._watchdog: Watchdog | None = None
        if limits is not None:
            self._progress = TrainingProgress(limits)
            self._watchdog = Watchdog(
                progress=self._progress,
                on_stall=self._leave_evidence,
                board=board,
                tick_s=min(max(min(limits.floor_s, limits.most_s) / 20, 0.05), 1.0),
            )
            self._watchdog.start()

    def starting(self) -> None:
        """Call before a trainer is created, which sends no heartbeats."""
        self.beat(step=0, phase="start", fresh=True)

    def beat(self, *, step: int, phase: Phase, fresh: bool) -> None:
        """Record a heartbeat of the trainer; see `Heartbeat.beat`."""
        if self._progress is not None:
            self._progress.beat(step=step, phase=phase, fresh=fresh)

    def watch(self, trainer: VerifiedTransferMixin, facts: report.RunFacts, directory: Path) -> None:
        """Call before training: from now on a stall is recorded in ``directory``, with the report of ``trainer``."""
        self._running = trainer, facts, directory

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._board is not None:
            self._board.leave()

    def lost_peer(self, error: BaseException) -> PeerLostError:
        """The error for a broken connection to another rank."""
        others, deadline = self._board.others() if self._board is not None else [], time.monotonic() + 1.0
        while others and all(each.alive for each in others) and time.monotonic() < deadline:
            time.sleep(0.02)  # a connection breaks before its process has ended
        gone = [each.name for each in others if not each.alive]
        cause = "another rank has ended, or did not join a collective within --ddp_timeout: see its own message"
        if gone:
            cause = f"{', '.join(gone)} ended without a message: killed (see `dmesg` for lack of memory), or crashed"
        where = self._progress.where if self._progress is not None else "in this job"
        return PeerLostError(f"the connection to another rank broke {where}: {cause}. {_INTACT}")

    def _leave_evidence(self, cause: str, silent_s: float, page: str) -> None:
        touch_pulse(self._environ)  # the supervisor waits for this
        assert self._progress is not None
        where = self._progress.where
        # Nothing is written to the output directory before the run owns it.
        directory = self._running[2] if self._running else Path(tempfile.mkdtemp(prefix="hf-rocm-tune-stall-"))
        text = directory / REPORT_FILE
        text.unlink(missing_ok=True)  # that of an earlier stall
        briefly(lambda: write_text_atomic(text, page), _BRIEFLY_SECONDS)
        kept = f"stacks and states of all ranks are in {text}" if text.exists() else f"{text} could not be written"
        briefly(lambda: self._report(cause, silent_s), 2 * _BRIEFLY_SECONDS)
        briefly(clear_live_line, _BRIEFLY_SECONDS)
        error = StallError(f"no progress for {silent_s:.0f} s {where}: {cause}; {kept}. {_INTACT}")
        briefly(lambda: self._tell(error), _BRIEFLY_SECONDS)

    def _report(self, cause: str, silent_s: float) -> None:
        if self._running is None or self._progress is None:
            return
        trainer, facts, directory = self._running
        step = self._progress.step + (self._progress.phase == "step")
        place = {"step": step, "stage": "progress", "tensor": "", "kind": "stall"}
        trainer.transfer_report.incident({**place, "cause": cause, "silent_seconds": silent_s, "outcome": "stopped"})
        report.write(report.build(trainer, facts, gather=False), directory)


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
    limits = Limits.of(setting, Supervised.of(environ), collective_s=collective_s)
    board = Board(place, rank=int(environ.get("RANK", "0"))) if place is not None else None
    guard = StallGuard(limits, board, tell, environ)
    try:
        yield guard
    except (RuntimeError, KeyboardInterrupt) as error:
        # A signal may arrive while a broken connection is handled.
        cause = error.__context__ if isinstance(error, KeyboardInterrupt) else error
        if cause is None or not is_lost_peer(cause):
            raise
        if threading.current_thread() is threading.main_thread():
            # The launcher's SIGTERM to the remaining ranks is not a request of the user to end the run.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise guard.lost_peer(cause) from error
    finally:
        guard.close()


class PeerLostError(StallError):
    """The connection to another rank, which ended for another reason, broke.

    Attributes:
        follows: this error is reported only if that reason is unknown.
    """

    follows = True


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None
