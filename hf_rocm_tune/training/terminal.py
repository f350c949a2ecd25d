"""What a run shows while it trains: its log as a table, and one live line where somebody watches.

It stands in the place of transformers' progress bar and of the dictionaries that it prints. What goes to files and to
the services of ``--report_to`` is not touched. Piped, there are rows only, without control characters. A notebook keeps
transformers' own table.

The loss of the live line is that of the last log: to read it at each step would make the host wait for the card.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import has_length

from hf_rocm_tune.training.report import describe_device
from hf_rocm_tune.training.telemetry import Telemetry, integrity_counters, torch_memory

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_rocm_tune.transfer import TransferReport

_REFRESH_S = 0.25
_MEMORY = ("gpu/vram_used_gib", "gpu/torch_reserved_gib")  # the first that is there: of the card, else of this process
_HOTSPOT = ("gpu/hotspot_max_c", "gpu/hotspot_c", "gpu/edge_c")


def _size(gb: float) -> str:
    return f"{gb:.3g} GB" if gb >= 0.1 else f"{1000 * gb:.3g} MB"


class _Column(NamedTuple):
    """One that the first training log lacks is left out."""

    keys: tuple[str, ...]  # of the log; the first that is there
    title: str
    width: int
    text: Callable[[float], str]


_COLUMNS = (
    _Column(("epoch",), "epoch", 6, "{:.2f}".format),
    _Column(("loss",), "loss", 8, "{:.4f}".format),
    _Column(("reward", "rewards/margins"), "reward", 8, "{:.3f}".format),
    _Column(("rewards/accuracies", "mean_token_accuracy"), "accuracy", 8, "{:.1%}".format),
    _Column(("grad_norm",), "grad norm", 9, "{:.3g}".format),
    _Column(("learning_rate",), "rate", 8, "{:.2e}".format),
    _Column(("speed/tokens_per_second",), "tokens/s", 8, "{:,.0f}".format),
    _Column(_MEMORY, "GiB", 9, "{:.1f}".format),
    _Column(_HOTSPOT, "hot", 5, "{:.0f} C".format),
    _Column(("integrity/verified_gb",), "verified", 8, _size),
    _Column(("integrity/mismatches",), "faults", 6, "{:.0f}".format),
)
_FIRST_TO_GO = ("epoch", "rate", "grad norm", "verified", "accuracy")  # where the terminal is narrow
_TOLD_OF_EVALUATIONS = ("loss", "accuracy", "accuracies", "margins", "reward")


def show(trainer: Trainer, *, report: TransferReport, telemetry: Telemetry | None) -> TerminalCallback | None:
    """Let a trainer show its log here instead of by transformers' callbacks; on the first rank.

    Args:
        trainer: before its ``train``.
        report: whose integrity counters the live line shows.
        telemetry: of the card; None for none.

    Returns:
        What shows it, to be closed however the training ends; None where a notebook does.
    """
    theirs = [each for each in trainer.callback_handler.callbacks if type(each) in (ProgressCallback, PrinterCallback)]
    for each in theirs:
        trainer.remove_callback(each)
    if not theirs or not trainer.is_world_process_zero():
        return None
    device = trainer.args.device
    memory = describe_device(device).get("memory_bytes")
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not trainer.args.disable_tqdm

    def now() -> dict[str, float]:
        counters = integrity_counters(report.to_dict())
        read = telemetry.latest() if telemetry is not None else torch_memory(device)
        return counters | {f"gpu/{name}": value for name, value in read.items()}

    made = TerminalCallback(live=live, now=now, memory_gib=memory / 2**30 if memory else None)
    trainer.add_callback(made)
    return made


def quieten_bars() -> None:
    """Have no progress bars of libraries where they would go into a file."""
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()


class TerminalCallback(TrainerCallback):
    """Prints a row for each log, and keeps the live line.

    Args:
        live: whether there is one.
        now: the integrity counters and the figures of the card, by the names of the log.
        memory_gib: of the card; None for none.
    """

    def __init__(self, *, live: bool, now: Callable[[], Mapping[str, float]], memory_gib: float | None) -> None:
        self._live = live
        self._now = now
        self._memory_gib = memory_gib
        self._columns: list[_Column] = []
        self._last: dict[str, Any] = {}  # the last training log
        self._progress: Progress | None = None
        self._refreshed = 0.0
        self._evaluated = 0

    def close(self) -> None:
        """Take the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin the live line."""
        if not self._live or self._progress is not None:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
            speed_estimate_period=600,  # seconds: a step may take a minute
        )
        self._progress.add_task("", total=state.max_steps, completed=state.global_step, figures="")
        self._progress.start()
        self._progress.console.show_cursor()  # a run that is killed cannot bring it back
        self._refresh(state, "")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move the live line on."""
        if self._progress is not None and self._due():
            self._refresh(state, self._figures())

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Show how far an evaluation is."""
        self._evaluated += 1
        if self._progress is not None and self._due():
            total = f" of {len(eval_dataloader)}" if has_length(eval_dataloader) else ""
            self._refresh(state, f"evaluating: batch {self._evaluated}{total}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The next evaluation begins anew."""
        self._evaluated = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Print a row."""
        if not logs:
            return
        step = f"{state.global_step}/{state.max_steps}"
        first = max(9, 2 * len(str(state.max_steps)) + 1)
        if "loss" in logs:
            self._last = dict(logs)
            if not self._columns:
                self._columns = self._chosen(logs, first)
                titles = (f"{each.title:>{each.width}}" for each in self._columns)
                print(f"{'step':>{first}}  {'  '.join(titles)}", flush=True)
            cells = (f"{self._cell(each):>{each.width}}" for each in self._columns)
            print(f"{step:>{first}}  {'  '.join(cells)}", flush=True)
            if self._progress is not None:
                self._refresh(state, self._figures())
        else:
            print(f"{step:>{first}}  {_sentence(logs)}", flush=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Nothing is left to watch."""
        self.close()

    def _chosen(self, logs: Mapping[str, Any], first: int) -> list[_Column]:
        """The columns that this log fills, as many as a terminal is wide."""
        found = [each for each in _COLUMNS if _first(logs, each.keys) is not None]
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        for title in _FIRST_TO_GO:
            if first + sum(each.width + 2 for each in found) > room:
                found = [each for each in found if each.title != title]
        return found

    def _cell(self, column: _Column) -> str:
        value = _first(self._last, column.keys)
        if value is None:
            return ""
        text = column.text(value)
        return f"{text}/{self._memory_gib:.1f}" if column.keys is _MEMORY and self._memory_gib else text

    def _figures(self) -> str:
        """The live line's middle."""
        now = self._now()
        known = {**self._last, **now}
        parts = [f"loss {known['loss']:.4f}"] if "loss" in known else []
        if (rate := known.get("speed/tokens_per_second")) is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        if (used := _first(now, _MEMORY)) is not None:
            parts.append(f"{used:.1f}" + (f" of {self._memory_gib:.1f} GiB" if self._memory_gib else " GiB"))
        if (hot := _first(now, _HOTSPOT[1:])) is not None:
            parts.append(f"{hot:.0f} C")
        faults = int(now["integrity/mismatches"])
        recovered = f", {now['integrity/recovered']:.0f} recovered" if faults else ""
        parts.append(f"{_size(now['integrity/verified_gb'])} verified, {faults} faults{recovered}")
        return " · ".join(parts)

    def _due(self) -> bool:
        return time.monotonic() - self._refreshed >= _REFRESH_S

    def _refresh(self, state: TrainerState, figures: str) -> None:
        assert self._progress is not None
        self._refreshed = time.monotonic()
        self._progress.update(self._progress.task_ids[0], completed=state.global_step, figures=figures, refresh=True)


def _first(values: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """The first number among these keys' values."""
    return next((values[key] for key in keys if isinstance(values.get(key), int | float)), None)


def _sentence(logs: Mapping[str, Any]) -> str:
    """A log that is no training step's, in words: an evaluation, the end of the training, or something of a plug-in."""
    if "train_runtime" in logs:
        parts = [f"{logs['train_runtime']:.1f} s"]
        parts += [f"mean loss {logs['train_loss']:.4f}"] if "train_loss" in logs else []
        parts += [f"{logs['train_samples_per_second']:.3g} rows/s"] if "train_samples_per_second" in logs else []
        return f"trained: {', '.join(parts)}"
    evaluation = any(key.startswith("eval_") for key in logs)
    told = {
        key.removeprefix("eval_"): value
        for key, value in logs.items()
        if not evaluation or (key.startswith("eval_") and key.endswith(_TOLD_OF_EVALUATIONS))
    }
    parts = [
        f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in told.items()
    ]
    if (seconds := logs.get("eval_runtime")) is not None:
        parts.append(f"{seconds:.1f} s")
    return f"{'evaluation: ' if evaluation else ''}{', '.join(parts)}"
