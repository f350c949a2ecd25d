"""The services that ``--report_to`` names: are they installed, and what they hear beside the loss.

Every service is a callback of transformers' own and gets one dict for each training log. What is added to that dict
here reaches all of them: TensorBoard, Trackio, Weights & Biases, MLflow and the others. It also enters the trainer's
history, so the curves of a finished run are drawn from it.

    integrity/verified_gb     10^9 bytes that were verified on their way to the device, so far
    integrity/mismatches      wrong bytes found so far: in transfers, casts, gradients, frozen weights, replicas, files
    integrity/recovered       of these, made right
    speed/seconds_per_step    mean since the last log, evaluation and saving not counted
    speed/tokens_per_second   likewise; of all ranks, where the trainer counts tokens (TRL's ``num_tokens``)

The counters are those of the process that logs, rank 0; the report at the end adds up all ranks. TensorBoard and
Trackio are tested with the services themselves, the others only as far as transformers' integrations are the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_rocm_tune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.training.mixin import VerifiedTransferMixin
    from hf_rocm_tune.transfer import TransferReport


def check_loggers(names: str | Iterable[str] | None) -> None:
    """Checks that transformers can report to each of these, before anything is loaded.

    Args:
        names: ``report_to`` of the training arguments, where "none" and "all" stand for themselves or are resolved.

    Raises:
        UsageError: one is unknown or not installed; names those that are.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    wanted = [names] if isinstance(names, str) else list(names or ())
    lacking = [name for name in wanted if name not in (*available, "none", "all")]
    if not lacking:
        return
    there = ", ".join(available) or "none of those that transformers knows"
    if any("," in name or " " in name for name in lacking):
        cure = "Give several as a list in a --config file, or `all`"
    else:
        cure = (
            "Install it (`pip install 'hf-rocm-tune[loggers]'` brings tensorboard and trackio), or leave the flag away"
        )
    raise UsageError(f"--report_to {' '.join(lacking)}: unknown or not installed; installed here: {there}. {cure}")


class CountersCallback(TrainerCallback):
    """Adds the counters of the module's description to each training log.

    To be added with :func:`count_in_logs`: a service sees only what a callback before it has added.

    Args:
        report: whose counters are logged.
        clock: seconds, from any beginning.
    """

    def __init__(self, report: TransferReport, clock: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._clock = clock
        self._seconds = 0.0
        self._steps = 0
        self._tokens = 0.0
        self._began: float | None = None
        self._ended: float | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Nothing has been timed yet."""
        self._seconds, self._steps, self._began, self._ended = 0.0, 0, None, None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Fetching the batches since the last step counts, unless something else was done meanwhile."""
        self._began = self._clock() if self._ended is None else self._ended
        self._ended = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One step more."""
        self._ended = self._clock()
        if self._began is not None:
            self._seconds += self._ended - self._began
            self._steps += 1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The time since the last step was no training."""
        self._ended = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Likewise."""
        self._ended = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Adds to training logs only: an evaluation at the same step would say the same again."""
        if logs is None or "loss" not in logs:
            return
        found = {**integrity_counters(self._report.to_dict()), **self._pace(logs.get("num_tokens"))}
        logs.update(found)
        state.log_history[-1].update(found)  # the trainer has entered a copy there

    def _pace(self, tokens: float | None) -> dict[str, float]:
        """Speed since the last log; nothing where no whole step was timed."""
        seconds, steps = self._seconds, self._steps
        new = 0.0 if tokens is None else tokens - self._tokens
        self._seconds, self._steps, self._tokens = 0.0, 0, tokens or 0.0
        if not steps or seconds <= 0:
            return {}
        rate = {"speed/tokens_per_second": round(new / seconds, 3)} if new > 0 else {}
        return {"speed/seconds_per_step": round(seconds / steps, 6), **rate}


def integrity_counters(report: Mapping[str, Any]) -> dict[str, float]:
    """The three ``integrity/`` metrics of `TransferReport.to_dict`."""
    sections = [section for section in report.values() if isinstance(section, Mapping)]
    return {
        "integrity/verified_gb": round(sum(one.get("verified_bytes", 0) for one in sections) / 1e9, 6),
        "integrity/mismatches": sum(one["mismatches"] for one in sections if "mismatches" in one),
        "integrity/recovered": sum(one["recovered"] for one in sections if "mismatches" in one and "recovered" in one),
    }


def count_in_logs(trainer: VerifiedTransferMixin) -> None:
    """Give a trainer the callback, before all others."""
    trainer.callback_handler.callbacks.insert(0, CountersCallback(trainer.transfer_report))
