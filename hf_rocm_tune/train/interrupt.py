"""Ctrl-C, SIGTERM, SIGHUP and the file ``CHECKPOINT``: a checkpoint at the end of the current step.

The signal handler only records the signal; the Trainer writes the checkpoint where it writes its own, so a resumed run
equals an uninterrupted one, and `Interrupted` (exit code 130) ends the run. ``touch output_dir/CHECKPOINT`` asks for a
checkpoint without an end. Ranks agree over gloo, one small all-reduce a step. Not covered: a step that never ends; the
stall watchdog and the supervisor end such a job.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from hf_rocm_tune.cards.agree import max_over_ranks
from hf_rocm_tune.errors import Interrupted
from hf_rocm_tune.lifecycle.heartbeat import Heartbeat, Phase
from hf_rocm_tune.survive.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

REQUEST_FILE = "CHECKPOINT"
"""Name of the file in ``output_dir`` that requests a checkpoint."""

SAME_PRESS_SECONDS = 1.0
"""A launcher and a terminal may both deliver one Ctrl-C; only a later signal counts as a second Ctrl-C."""


class StopRequests:
    """The signals that ask for the end of the run, recorded until a step is complete.

    The first one is recorded; a Ctrl-C after it raises ``KeyboardInterrupt`` at once, any other signal after it has no
    effect. Handlers that the user has set, and signals that are ignored (``nohup``), are left alone.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal that asked for the end; 0 for none."""
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._owner = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals within the block; does nothing outside the main thread, and when nested."""
        if self._before or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.received, self._owner = 0, os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            current = signal.getsignal(number)
            if current in (signal.SIG_DFL, signal.default_int_handler) or getattr(current, "ends_the_process", False):
                self._before[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            for taken, handler in self._before.items():
                if signal.getsignal(taken) == self._remember:  # not ignored since: the result may be complete
                    signal.signal(taken, handler)
            self._before.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a data loader's worker: SIGTERM ends it, the signals of a terminal do not
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            name = signal_name(number)
            text = f"hf-rocm-tune: {name}: the run saves what it has and ends; another Ctrl-C ends it at once\n"
            if os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # a terminal that is gone
                    os.write(2, text.encode())  # not print(): it may be what was interrupted
        elif number == signal.SIGINT and now - self._since > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt


class InterruptCallback(TrainerCallback):
    """Requests a save for a signal or the file; after a signal's save `Interrupted` is raised on every rank."""

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests
        self.save_wanted = False  # all ranks have agreed on a checkpoint of the step that has just ended
        self._stop = 0
        self._strategy: SaveStrategy | None = None  # the run's, while it is set aside

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.save_wanted, self._stop = False, 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Agrees with the other ranks. Collective."""
        asked_by_file = state.is_world_process_zero and _is_asked(args)
        self._stop, by_file = max_over_ranks([self._requests.received, int(asked_by_file)])
        self.save_wanted = bool(self._stop or by_file)
        if self.save_wanted:
            control.should_save = True
            if args.save_strategy == SaveStrategy.BEST:  # an evaluation that is not the best would cancel the save
                self._strategy, args.save_strategy = args.save_strategy, SaveStrategy.STEPS

    def saving(self, args: TrainingArguments) -> None:
        """A checkpoint is about to be written, with the arguments of the run."""
        if self._strategy is not None:
            args.save_strategy, self._strategy = self._strategy, None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.save_wanted:
            return
        self.save_wanted = False
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        saved = (checkpoint / MANIFEST_NAME).exists()
        if state.is_world_process_zero and _is_asked(args):
            (Path(args.output_dir) / REQUEST_FILE).unlink(missing_ok=True)
        if self._stop:
            could = "is written" if saved else "could not be written, earlier checkpoints are intact"
            ended = f"stopped by {signal_name(self._stop)}, {checkpoint.name} {could}"
            raise Interrupted(f"{ended}; the same command continues from there")


def _is_asked(args: TrainingArguments) -> bool:
    """Whether the file is there; only an empty one is a request, because it will be deleted."""
    try:
        request = os.lstat(os.path.join(args.output_dir, REQUEST_FILE))
    except OSError:
        return False
    return stat.S_ISREG(request.st_mode) and request.st_size == 0


_BEATS: dict[str, Phase] = {
    "on_train_begin": "between", "on_epoch_begin": "between", "on_step_begin": "step", "on_substep_end": "step",
    "on_step_end": "between", "on_prediction_step": "evaluate", "on_evaluate": "between", "on_train_end": "end",
}  # fmt: skip


class HeartbeatCallback(TrainerCallback):
    """Sends a heartbeat at every event of the trainer."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        def beat(phase: Phase, _args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
            heartbeat.beat(step=state.global_step, phase=phase)

        for event, phase in _BEATS.items():
            setattr(self, event, partial(beat, phase))


def signal_name(number: int) -> str:
    """ "Ctrl-C" for SIGINT, else the signal's own name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
