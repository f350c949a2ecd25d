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
from typing import Any, NamedTuple

import torch.distributed as dist

from hf_rocm_tune.errors import StallError, TuneError, UsageError
from hf_rocm_tune.lifecycle.heartbeat import Phase, Supervised, phase_name, touch_pulse
from hf_rocm_tune.lifecycle.watchdog import RankStatus, Watchdog, briefly
from hf_rocm_tune.survive.atomic import write_text_atomic

_FLOOR_SECONDS = 300.0
_FACTOR = 10.0
_PATIENT = 4.0
_START = 24.0
"""Multiples of the floor: for phases without a measure, and before training, where there are no heartbeats."""
_BEFORE_OTHERS = 0.8
"""Share of the limits of the supervisor and of the collectives, which also end a job but do not know the cause."""
_MEASURED = 50
_ENOUGH = 3
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


class _Run(NamedTuple):
    """A run that owns its directory."""

    directory: Path
    record: Callable[[dict[str, Any]], None]  # writes its report with this incident; no other rank is asked


class StallGuard(Watchdog):
    """The watchdog of a job. ``setting``: ``--stall_timeout``; ``collective_s``: after which a collective gives up."""

    def __init__(
        self,
        setting: str,
        supervisor: Supervised | None,
        *,
        rank_status: RankStatus | None = None,
        report: Callable[[TuneError], None] = print,
        collective_s: float | None = None,
    ) -> None:
        seconds = parse(setting)
        self.off = seconds == 0
        self._floor_s = _FLOOR_SECONDS
        self._factor = _FACTOR
        if seconds is not None:
            self._floor_s = seconds
            self._factor = 0.0
        self._start_s = _START * self._floor_s
        most = _BEFORE_OTHERS * (collective_s or float("inf"))
        if supervisor is not None:
            most = min(most, _BEFORE_OTHERS * supervisor.stall_seconds or most)
            self._start_s = min(self._start_s, _BEFORE_OTHERS * supervisor.start_seconds or self._start_s)
        super().__init__(rank_status, tick_s=min(max(min(self._floor_s, most) / 20, 0.05), 1.0))
        self._most_s = most
        self._report_error = report
        self._steps: deque[float] = deque(maxlen=_MEASURED)
        self._run: _Run | None = None
        self._phase: Phase = "start"
        self._since = 0.0
        self.beat(step=0, phase="start")

    def watch(self, directory: Path, record: Callable[[dict[str, Any]], None]) -> None:
        """The run owns its directory: from now on a stall is recorded there; ``record`` writes the report with the
        incident that it gets, and must not wait for another rank."""
        self._run = _Run(directory, record)

    def beat(self, *, step: int, phase: Phase) -> None:
        """Record a heartbeat; see `Heartbeat.beat`."""
        now = time.monotonic()
        if self._phase == "step":
            self._steps.append(now - self._since)
        self._since = now
        self._step = step
        self._phase = phase
        self.limit_s = self._limit_s()
        self.where = phase_name(phase, step)
        self.beats += 1

    def _limit_s(self) -> float | None:
        if self.off or self._phase == "publish":  # an upload sends no heartbeat
            return None
        if self._phase == "start":
            return self._start_s
        measured = self._phase == "step" and len(self._steps) >= _ENOUGH
        step_s = self._factor * statistics.median(self._steps) if measured else _PATIENT * self._floor_s
        return min(max(self._floor_s, step_s), self._most_s)

    def leave_evidence(self, cause: str, silent_s: float, page: str) -> None:
        touch_pulse()  # the supervisor waits for this
        # Nothing is written to the output directory before the run owns it.
        if self._run is not None:
            directory = self._run.directory
        else:
            directory = Path(tempfile.mkdtemp(prefix="hf-rocm-tune-stall-"))
        text = directory / "stall_report.txt"
        briefly(lambda: write_text_atomic(text, page), 5.0)
        briefly(lambda: self._report(cause, silent_s), 10.0)
        error = StallError(
            f"no progress for {silent_s:.0f} s {self.where}: {cause}; stack traces and states of all ranks were "
            f"written to {text}. {_INTACT}"
        )
        briefly(lambda: self._report_error(error), 5.0)

    def _report(self, cause: str, silent_s: float) -> None:
        if self._run is None:
            return
        step = self._step + 1 if self._phase == "step" else self._step
        where = {"step": step, "stage": "progress", "tensor": "", "kind": "stall"}
        self._run.record({**where, "cause": cause, "silent_seconds": silent_s, "outcome": "stopped"})


@contextmanager
def watched(
    setting: str,
    *,
    rendezvous: Path | None,
    report: Callable[[TuneError], None],
    collective_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[StallGuard]:
    """Run the watchdog within the block, and report a lost connection to another rank in one line."""
    rank_status = RankStatus(rendezvous, rank=int(environ.get("RANK", "0"))) if rendezvous is not None else None
    supervisor = Supervised.of(environ)
    guard = StallGuard(setting, supervisor, rank_status=rank_status, report=report, collective_s=collective_s)
    if not guard.off:
        guard.start()
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
        raise _lost_peer(guard) from error
    finally:
        if not guard.off:
            guard.stop()
        if rank_status is not None:
            rank_status.leave()


class PeerLostError(StallError):
    """The connection to another rank broke; reported only if the reason for which that rank ended is unknown."""

    follows = True


def _lost_peer(guard: StallGuard) -> PeerLostError:
    time.sleep(0.5)  # a connection breaks before its process has ended
    gone = ""
    if guard.rank_status is not None:
        gone = ", ".join(rank.name for rank in guard.rank_status.others() if not rank.alive)
    cause = "another rank has ended, or did not join a collective within --ddp_timeout: see its own message"
    if gone:
        cause = f"{gone} ended without a message: killed (see `dmesg` for lack of memory), or crashed"
    return PeerLostError(f"the connection to another rank broke {guard.where}: {cause}. {_INTACT}")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    pattern = _NCCL if isinstance(error, dist.DistBackendError) else _GLOO
    return isinstance(error, RuntimeError) and pattern.search(str(error)) is not None
