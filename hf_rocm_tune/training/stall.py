"""The stall watchdog of a training job: how long each phase may take, and what is left behind when one takes longer.

The signs of life are those that the supervisor is told (`supervised`), with the same phases. A training step is held to
what the last ones took; what has no such measure (the first steps, in which kernels are compiled, a new pass over the
data, an evaluation, a save) gets longer.
"""

from __future__ import annotations

import json
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

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.integrity.atomic import write_text_atomic
from hf_rocm_tune.ranks.stall_report import is_lost_peer, lost_peer, render
from hf_rocm_tune.ranks.watchdog import Board, Look, Stall, Watchdog, briefly
from hf_rocm_tune.training import report
from hf_rocm_tune.training.supervised import Patience, Phase, hold_on, patience
from hf_rocm_tune.training.telemetry import clear_live_line

if TYPE_CHECKING:
    from hf_rocm_tune.training.trainer import VerifiedTransferMixin

REPORT_FILES = ("stall_report.txt", "stall_report.json")
"""For people, and for programs."""

_FLOOR_SECONDS, _FACTOR = 300.0, 10.0
_PATIENT, _START = 4.0, 24.0
"""Times the floor: for what is not measured, and before the training, where nothing tells of progress."""
_BEFORE_OTHERS = 0.8
"""The supervisor, and the library of the collectives, end a job as well, and cannot know the cause."""
_MEASURED, _ENOUGH = 50, 3
_REPORT_SECONDS, _EVIDENCE_SECONDS, _TELL_SECONDS = 5.0, 10.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that may pass without a sign of life."""

    floor_s: float  # in a training step, at least
    factor: float  # times the median of the last ones, if that is more
    patient_s: float  # in the first steps, at the begin of a pass over the data, in an evaluation, a save, at the end
    start_s: float  # before the training
    most_s: float  # in any of them but the last, whatever the others say

    @classmethod
    def of(cls, setting: str, supervisor: Patience | None, *, collective_s: float | None = None) -> Limits | None:
        """The limits for a value of ``--stall_timeout``; None where the user wants none.

        Args:
            setting: ``auto``, or the seconds that a training step may take, 0 for no limit.
            supervisor: how long it waits itself.
            collective_s: how long a collective may take, until its library gives up without a cause.
        """
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
    """A value of ``--stall_timeout`` in seconds; None for ``auto``.

    Raises:
        UsageError: it is neither ``auto`` nor a number from 0 on.
    """
    if setting == "auto":
        return None
    try:
        seconds = float(setting)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--stall_timeout {setting} is not valid: give auto, a number of seconds, or 0 for never")
    return seconds


class Pace:
    """How the training gets on: heard by its own thread, looked at by the watchdog's.

    ``mark`` is told what the training is at, at every sign of life.
    """

    def __init__(self, limits: Limits, mark: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._limits, self._mark, self._clock = limits, mark, clock
        self._steps: deque[float] = deque(maxlen=_MEASURED)
        self._fresh = True
        self._beats, self._since = 0, clock()
        self.step, self.phase = 0, "start"

    def hear(self, *, step: int, phase: Phase, fresh: bool = False) -> None:
        """A sign of life; see `supervised.Heartbeat`."""
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
        """What the training is at, for people."""
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
            return None  # an upload tells of no progress
        if self.phase == "start":
            return limits.start_s
        if self.phase not in ("step", "between") or self._fresh or len(steps) < _ENOUGH:
            return min(limits.patient_s, limits.most_s)
        return min(max(limits.floor_s, limits.factor * statistics.median(steps)), limits.most_s)


class StallGuard:
    """The watchdog of one job, its meeting place, and what it leaves.

    Args:
        limits: None: nothing is watched.
        board: where the ranks of this machine meet; None for a process alone.
        tell: records an error as the ending of this process and prints it.
    """

    def __init__(
        self, limits: Limits | None, board: Board | None, tell: Callable[[TuneError], None], environ: Mapping[str, str]
    ) -> None:
        self._board, self._tell = board, tell
        self._trainer: VerifiedTransferMixin | None = None
        self._facts: report.RunFacts | None = None
        self._directory: Path | None = None
        self._pace: Pace | None = None
        self._watchdog: Watchdog | None = None
        if limits is not None:
            self._pace = Pace(limits, board.mark if board is not None else lambda _: None)
            self._watchdog = Watchdog(
                look=self._pace.look,
                on_suspicion=lambda: hold_on(environ),
                on_stall=self._leave_evidence,
                board=board,
                elsewhere=_elsewhere(environ),
                tick_s=limits.tick_s,
            )
            self._watchdog.start()

    def starting(self) -> None:
        """A trainer is about to be made: nothing tells of progress."""
        if self._pace is not None:
            self._pace.hear(step=0, phase="start", fresh=True)

    def hear(self, *, step: int, phase: Phase, fresh: bool) -> None:
        """A sign of life of the trainer; see `supervised.Heartbeat`."""
        if self._pace is not None:
            self._pace.hear(step=step, phase=phase, fresh=fresh)

    def watch(self, trainer: VerifiedTransferMixin, facts: report.RunFacts, directory: Path) -> None:
        """A trainer is about to train, in a directory that holds what is left of a stall; ``facts``: for its report."""
        self._trainer, self._facts, self._directory = trainer, facts, directory

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._board is not None:
            self._board.leave()

    def lost_peer(self, error: BaseException) -> StallError:
        others = self._board.others() if self._board is not None else []
        where = self._pace.where if self._pace is not None else "in this job"
        return lost_peer(error, others, where=where)

    def _leave_evidence(self, stall: Stall) -> None:
        # Before the run owns its directory nothing is written there.
        directory = self._directory or Path(tempfile.mkdtemp(prefix="hf-rocm-tune-stall-"))
        text, data = (directory / name for name in REPORT_FILES)
        content = {text: render(stall.report), data: json.dumps(stall.report, indent=1) + "\n"}
        written = briefly(lambda: _write(content), _REPORT_SECONDS) and text.exists()
        kept = f"stacks and states of all ranks are in {text}" if written else f"{text} could not be written"
        error = StallError(
            f"no progress for {stall.silent_s:.0f} s {stall.where}: {stall.cause}; {kept}. The checkpoints already "
            "written are intact: start the same command again to continue from the newest one"
        )
        briefly(lambda: self._report(stall), _EVIDENCE_SECONDS)
        briefly(clear_live_line, _TELL_SECONDS)
        briefly(lambda: self._tell(error), _TELL_SECONDS)

    def _report(self, stall: Stall) -> None:
        if self._trainer is None or self._facts is None or self._directory is None or self._pace is None:
            return
        self._trainer.transfer_report.incident(
            {
                "step": self._pace.step + (self._pace.phase == "step"),
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
    """Within the block the job is watched, and a lost connection to another rank is one line.

    Args:
        setting, collective_s: see `Limits.of`.
        place: a directory that the ranks of this job on this machine have in common; None for a process alone.
        tell: see `StallGuard`.

    Raises:
        PeerLostError: another rank has gone.
        UsageError: the setting is wrong, or the place is somebody else's.
    """
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
            # The launcher ends the ranks that are left; that is no wish of the user to end the run.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise guard.lost_peer(lost) from error
    finally:
        guard.close()


def _lost_peer_in(error: BaseException) -> BaseException | None:
    """The broken connection that this error is, or during whose handling a signal came."""
    if is_lost_peer(error):
        return error
    during = error.__context__ if isinstance(error, KeyboardInterrupt) else None
    return during if during is not None and is_lost_peer(during) else None


def _write(content: Mapping[Path, str]) -> None:
    for file, text in content.items():
        try:
            write_text_atomic(file, text)
        except OSError:
            file.unlink(missing_ok=True)  # an earlier one is not this stall's


def _elsewhere(environ: Mapping[str, str]) -> int:
    world = int(environ.get("WORLD_SIZE", "1"))
    return max(world - int(environ.get("LOCAL_WORLD_SIZE", str(world))), 0)
