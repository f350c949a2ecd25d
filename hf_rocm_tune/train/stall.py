"""The stall watchdog of a training job: time limits of each phase, and the evidence that is written after a stall.

The limit of a training step follows from the duration of the last steps; phases without such a measure (the first
steps, in which kernels are compiled, a new epoch, an evaluation, a save) get a longer one.
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
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.survive.atomic import write_text_atomic
from hf_rocm_tune.survive.heartbeat import Phase, Supervised, phase_name, touch_pulse
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
    """The progress of training and its limits: updated by its thread, read by the watchdog's; see `Watchdog`."""

    def __init__(
        self,
        setting: str,
        supervisor: Supervised | None,
        *,
        collective_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``setting``: ``--stall_timeout``; ``collective_s``: after which a collective gives up."""
        seconds = parse(setting)
        self.off = seconds == 0
        self.floor_s, self._factor = (_FLOOR_SECONDS, _FACTOR) if seconds is None else (seconds, 0.0)
        self._start_s, most = _START * self.floor_s, _BEFORE_OTHERS * (collective_s or float("inf"))
        if supervisor is not None:
            most = min(most, _BEFORE_OTHERS * supervisor.stall_seconds or most)
            self._start_s = min(self._start_s, _BEFORE_OTHERS * supervisor.start_seconds or self._start_s)
        self.most_s, self._clock = most, clock
        self._steps: deque[float] = deque(maxlen=_MEASURED)
        self._fresh = True
        self.beats, self._since = 0, clock()
        self.step = 0
        self.phase: Phase = "start"

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
        return phase_name(self.phase, self.step)

    @property
    def limit_s(self) -> float | None:
        """Seconds that may pass without a heartbeat; an upload sends none."""
        steps = list(self._steps)
        if self.off or self.phase == "publish":
            return None
        if self.phase == "start":
            return self._start_s
        if self.phase not in ("step", "between") or self._fresh or len(steps) < _ENOUGH:
            return min(_PATIENT * self.floor_s, self.most_s)
        return min(max(self.floor_s, self._factor * statistics.median(steps)), self.most_s)


class StallGuard:
    """The watchdog of one job and the evidence that it writes."""

    def __init__(self, progress: TrainingProgress, board: Board | None, tell: Callable[[TuneError], None]) -> None:
        self._progress, self._tell, self.beat = progress, tell, progress.beat
        self._running: tuple[VerifiedTransferMixin, report.RunFacts, Path] | None = None
        tick_s = min(max(min(progress.floor_s, progress.most_s) / 20, 0.05), 1.0)
        self.watchdog = Watchdog(progress=progress, on_stall=self._leave_evidence, board=board, tick_s=tick_s)

    def watch(self, trainer: VerifiedTransferMixin, facts: report.RunFacts, directory: Path) -> None:
        """Call before training: from now on a stall is recorded in ``directory``, with the report of ``trainer``."""
        self._running = trainer, facts, directory

    def _leave_evidence(self, cause: str, silent_s: float, page: str) -> None:
        touch_pulse()  # the supervisor waits for this
        # Nothing is written to the output directory before the run owns it.
        directory = self._running[2] if self._running else Path(tempfile.mkdtemp(prefix="hf-rocm-tune-stall-"))
        text = directory / REPORT_FILE
        text.unlink(missing_ok=True)  # that of an earlier stall
        briefly(lambda: write_text_atomic(text, page), _BRIEFLY_SECONDS)
        kept = f"stacks and states of all ranks are in {text}" if text.exists() else f"{text} could not be written"
        briefly(lambda: self._report(cause, silent_s), 2 * _BRIEFLY_SECONDS)
        briefly(clear_live_line, _BRIEFLY_SECONDS)
        where = self._progress.where
        error = StallError(f"no progress for {silent_s:.0f} s {where}: {cause}; {kept}. {_INTACT}")
        briefly(lambda: self._tell(error), _BRIEFLY_SECONDS)

    def _report(self, cause: str, silent_s: float) -> None:
        if self._running is None:
            return
        trainer, facts, directory = self._running
        step = self._progress.step + (self._progress.phase == "step")
        where = {"step": step, "stage": "progress", "tensor": "", "kind": "stall"}
        trainer.transfer_report.incident({**where, "cause": cause, "silent_seconds": silent_s, "outcome": "stopped"})
        report.write(report.build(trainer, facts, gather=False), directory)


@contextmanager
def watched(
    setting: str,
    *,
    rendezvous: Path | None,
    tell: Callable[[TuneError], None],
    collective_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[StallGuard]:
    """Run the watchdog within the block, and report a lost connection to another rank in one line."""
    progress = TrainingProgress(setting, Supervised.of(environ), collective_s=collective_s)
    board = Board(rendezvous, rank=int(environ.get("RANK", "0"))) if rendezvous is not None else None
    guard = StallGuard(progress, board, tell)
    if not progress.off:
        guard.watchdog.start()
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
        raise _lost_peer(progress.where, board) from error
    finally:
        if not progress.off:
            guard.watchdog.stop()
        if board is not None:
            board.leave()


class PeerLostError(StallError):
    """The connection to another rank broke; reported only if the reason for which that rank ended is unknown."""

    follows = True


def _lost_peer(where: str, board: Board | None) -> PeerLostError:
    others, deadline = board.others() if board is not None else [], time.monotonic() + 1.0
    while others and all(each.alive for each in others) and time.monotonic() < deadline:
        time.sleep(0.02)  # a connection breaks before its process has ended
    gone = ", ".join(each.name for each in others if not each.alive)
    cause = "another rank has ended, or did not join a collective within --ddp_timeout: see its own message"
    if gone:
        cause = f"{gone} ended without a message: killed (see `dmesg` for lack of memory), or crashed"
    return PeerLostError(f"the connection to another rank broke {where}: {cause}. {_INTACT}")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None
