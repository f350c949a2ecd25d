"""Metrics that a run shows and logs besides the loss: the card's sensors, speed, integrity counters.

A thread reads the sensors of AMD cards (sysfs): at the end of a step the card is idle, and a driver may hang in a read.
A value that could not be read is left out, never 0. What `MetricsCallback` adds to a log reaches every service. The
terminal shows the log as a table with one live line.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_rocm_tune.machine.child import pci_address
from hf_rocm_tune.machine.gpus import HOTSPOT_C, read_sensors
from hf_rocm_tune.machine.sysfs import Files
from hf_rocm_tune.train.device_memory import read

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState

    from hf_rocm_tune.transfer import TransferReport

_STOP_S = 1.0  # a reading that hangs is not waited for
_GIB = 1 << 30
# Name of the metric: field of the sensors' record, and the factor to its unit.
_METRICS = {
    "edge_c": ("edge_c", 1.0),
    "hotspot_c": ("hotspot_c", 1.0),
    "memory_c": ("memory_c", 1.0),
    "power_w": ("power_w", 1.0),
    "utilisation_percent": ("utilisation", 100.0),
    "vram_used_gib": ("vram_used_bytes", 1 / _GIB),
}
_LIMITS = {"held_down_temperature": {"temperature"}, "held_down_power": {"power", "current"}}
"""Metrics that are 1 while the card lowers its clocks for one of these causes, see `read_throttle`. A power limit is
usual under full load (general knowledge, lower confidence) and no reason for a warning."""
_SAID = {
    "held_down_temperature": "warning: the card lowers its clocks because of its temperature ({source}): training is "
    "slower than it could be; check the card's fans and the airflow in the case",
    "hotspot_c": "warning: the card's hotspot is at {hotspot_c:.0f} degrees Celsius ({source}); RDNA3 throttles up to "
    "about 110 (general knowledge, lower confidence): check its fans and the airflow in the case, or lower its power "
    "limit",
}
"""What is said once when a metric reaches 1, the hotspot's temperature `HOTSPOT_C`."""

Reading = tuple[dict[str, float], dict[str, str]]
"""Metrics by name, with the unit in the name; and by name why others could not be read."""


def sample(files: Files, address: str) -> Reading:
    """Read the sensors of the card at a PCI address, ``domain:bus:device.function``."""
    sensors = read_sensors(files, address)
    metrics: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, (sensor, factor) in _METRICS.items():
        value = getattr(sensors, sensor)
        if value is None:
            missing[name] = sensors.missing[sensor]
        else:
            metrics[name] = value * factor
    if sensors.throttle is None:
        missing["limits"] = sensors.missing["throttle"]
    else:
        metrics |= {name: float(not limits.isdisjoint(sensors.throttle)) for name, limits in _LIMITS.items()}
    return metrics, missing


def card_of(device: torch.device) -> tuple[str | None, str]:
    """PCI address of the card behind ``device`` if it has sensors to read, else None; and the reason why not."""
    if device.type != "cuda":
        return None, f"training on {device.type}: there are no sensors to read"
    if torch.version.hip is None:
        return None, "not an AMD card: its sensors are not read, only torch's own memory"
    index = torch.cuda.current_device() if device.index is None else device.index
    address = pci_address(index)
    if not address:
        return address, "this torch does not report the PCI address of its devices"
    return address, ""


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, memory and architecture of the device as reported by torch; for the CPU its name and thread count."""
    if device.type == "cpu":
        return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
    kind = "hip" if torch.version.hip else "cuda"
    return {"type": kind, "name": properties.name, "memory_bytes": properties.total_memory, "arch": arch}


class _Series(NamedTuple):
    """A metric's values."""

    number: int = 0
    total: float = 0.0
    greatest: float = float("-inf")

    @property
    def mean(self) -> float:
        return round(self.total / self.number, 3)


class Telemetry:
    """Collects the sensor readings of one card. ``start`` and ``stop`` may be repeated; readings accumulate."""

    def __init__(
        self,
        read: Callable[[], Reading] | None,
        *,
        source: str,
        every_s: float,
        say: Callable[[str], None],
        device: torch.device | None = None,
    ) -> None:
        self._read = read
        self._source = source
        self._every_s = every_s
        self._say = say
        self._device = device
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # over all below
        self._seconds = 0.0
        self._samples = 0
        self._run: dict[str, _Series] = {}
        self._recent: dict[str, _Series] = {}
        self._missing: dict[str, str] = {}
        self._left_to_say = dict(_SAID)

    def start(self) -> None:
        if self._read is None or self._thread is not None:
            return
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stopped,), name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            self._thread = None

    def _watch(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            self.sample()
            stopped.wait(self._every_s)

    def sample(self) -> None:
        if self._read is None:
            return
        began = time.perf_counter()
        metrics, missing = self._read()
        with self._lock:
            self._samples += 1
            self._missing = missing
            for series in (self._run, self._recent):
                for name, value in metrics.items():
                    so_far = series.get(name, _Series())
                    series[name] = _Series(so_far.number + 1, so_far.total + value, max(so_far.greatest, value))
            self._seconds += time.perf_counter() - began
        for name in tuple(self._left_to_say):
            limit = HOTSPOT_C if name == "hotspot_c" else 1.0
            if metrics.get(name, 0.0) >= limit:
                self._say(self._left_to_say.pop(name).format(source=self._source, **metrics))

    def since_last_log(self) -> dict[str, float]:
        """Metrics by name for a training log: means since the last one, and the highest hotspot."""
        with self._lock:
            recent = self._recent
            self._recent = {}
        metrics = {f"gpu/{name}": series.mean for name, series in recent.items()}
        if "hotspot_c" in recent:
            metrics["gpu/hotspot_max_c"] = round(recent["hotspot_c"].greatest, 3)
        return metrics

    def summary(self) -> dict[str, Any]:
        """For the report; ``seconds``: time of all readings together; of torch's allocator the peaks, in GiB."""
        with self._lock:
            row: dict[str, Any] = {"source": self._source, "looks": self._samples, "seconds": round(self._seconds, 4)}
            for name, series in self._run.items():
                row[name] = {"mean": series.mean, "max": round(series.greatest, 3)}
            missing = {name: why for name, why in self._missing.items() if name not in self._run}
            if missing:
                row["missing"] = missing
        if self._device is not None and self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)  # empty before the first allocation
            for what in ("allocated", "reserved"):
                row[f"torch_peak_{what}_gib"] = round(stats.get(f"{what}_bytes.all.peak", 0) / _GIB, 3)
        return row


def of_device(device: torch.device, *, every_s: float, say: Callable[[str], None]) -> Telemetry:
    """Telemetry of the card that is trained on, found by its PCI address."""
    address, reason = card_of(device)
    files = Files()
    read = None if address is None else lambda: sample(files, address)
    source = reason if address is None else f"amdgpu, {address}"
    return Telemetry(read, source=source, every_s=every_s, say=say, device=device)


# ---- logs ---------------------------------------------------------------------------------------------------


def integrity_counters(report: Mapping[str, Any]) -> dict[str, float]:
    """The three ``integrity/`` metrics, from `TransferReport.to_dict`."""
    verified_bytes = 0
    mismatches = 0
    recovered = 0
    for section in report.values():
        if not isinstance(section, Mapping):
            continue
        verified_bytes += section.get("verified_bytes", 0)
        if "mismatches" in section:
            mismatches += section["mismatches"]
            recovered += section.get("recovered", 0)
    return {
        "integrity/verified_gb": round(verified_bytes / 1e9, 6),
        "integrity/mismatches": mismatches,
        "integrity/recovered": recovered,
    }


class MetricsCallback(TrainerCallback):
    """Adds to each training log ``gpu/...``, ``memory/...``, ``integrity/...`` (10^9 bytes, rank 0's; the report adds
    up all ranks) and ``speed/...`` since the last log, without evaluation and saving.

    Must come before the callbacks of the logging services, which see only what an earlier callback has added.
    """

    def __init__(self, report: TransferReport, telemetry: Telemetry | None = None) -> None:
        self._report = report
        self._telemetry = telemetry
        self._seconds = 0.0
        self._steps = 0
        self._tokens = 0.0
        self._began = 0.0
        self._ended: float | None = None  # of the last step, if nothing but fetching batches came after it

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0
        self._steps = 0
        self._ended = None
        if self._telemetry is not None:
            self._telemetry.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._telemetry is not None:
            self._telemetry.stop()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter() if self._ended is None else self._ended

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ended = time.perf_counter()
        self._seconds += self._ended - self._began
        self._steps += 1

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._ended = None

    on_save = on_evaluate

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Adds to training logs only: an evaluation at the same step would repeat them."""
        if logs is None or "loss" not in logs:
            return
        metrics = {**integrity_counters(self._report.to_dict()), **self._pace(logs.get("num_tokens"))}
        if args.device.type == "cuda":
            metrics |= read(args.device).for_log()
        if self._telemetry is not None:
            metrics |= self._telemetry.since_last_log()
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # the trainer has entered a copy there

    def _pace(self, tokens: float | None) -> dict[str, float]:
        """Speed since the last log; empty if no complete step was timed."""
        seconds = self._seconds
        steps = self._steps
        new_tokens = 0.0 if tokens is None else tokens - self._tokens
        self._seconds = 0.0
        self._steps = 0
        self._tokens = tokens or 0.0
        if not steps or seconds <= 0:
            return {}
        speed = {"speed/seconds_per_step": round(seconds / steps, 6)}
        if new_tokens > 0:
            speed["speed/tokens_per_second"] = round(new_tokens / seconds, 3)
        return speed


# ---- the terminal -------------------------------------------------------------------------------------------


def _size(gb: float) -> str:
    return f"{gb:.3g} GB" if gb >= 0.1 else f"{1000 * gb:.3g} MB"


class _Column(NamedTuple):
    """A column of the table; left out if the first training log does not have its value."""

    keys: tuple[str, ...]  # of the log; the first one present is shown
    title: str
    width: int
    text: Callable[[float], str]
    first_to_drop: int = 9  # on a narrow terminal, in this order
    on_bar: int = 0  # its place among the figures beside the bar, from 1


_MEMORY = ("gpu/vram_used_gib", "memory/reserved_gib")  # of the card, else of this process
_COLUMNS = (
    _Column(("epoch",), "epoch", 6, "{:.2f}".format, 0),
    _Column(("loss",), "loss", 8, "{:.4f}".format, on_bar=1),
    _Column(("reward",), "reward", 8, "{:.3f}".format),
    _Column(("rewards/margins",), "margin", 8, "{:.3f}".format),
    _Column(("rewards/accuracies", "mean_token_accuracy"), "accuracy", 8, "{:.1%}".format, 4),
    _Column(("grad_norm",), "grad norm", 9, "{:.3g}".format, 2),
    _Column(("learning_rate",), "rate", 8, "{:.2e}".format, 1),
    _Column(("speed/tokens_per_second",), "tokens/s", 8, "{:,.0f}".format, on_bar=4),
    _Column(_MEMORY, "GiB", 9, "{:.1f}".format, on_bar=5),
    _Column(("gpu/hotspot_max_c", "gpu/edge_c"), "hot", 5, "{:.0f} C".format, on_bar=6),
    _Column(("integrity/verified_gb",), "verified", 8, _size, 3, on_bar=3),
    _Column(("integrity/mismatches",), "faults", 6, "{:.0f}".format, on_bar=2),
)
_BAR_COLUMNS = 54  # a bar that can be read, the steps and the times
_SHOWN_OF_EVALUATIONS = ("loss", "accuracy", "accuracies", "margins", "reward")


def show(trainer: Trainer) -> None:
    """Replace transformers' progress and printer callbacks by ours, which on rank 0 show the log unless it is quiet."""
    stock = (ProgressCallback.__name__, PrinterCallback.__name__, "NotebookProgressCallback")
    theirs = [callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ in stock]
    for callback in theirs:
        trainer.remove_callback(callback)
    if not theirs or not trainer.is_world_process_zero() or is_quiet():
        return
    memory = describe_device(trainer.args.device).get("memory_bytes")
    memory_gib = memory / _GIB if memory else None
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not trainer.args.disable_tqdm
    of_kind = NotebookCallback if type(theirs[0]).__name__ == stock[2] else TerminalCallback
    trainer.add_callback(of_kind(live=live, memory_gib=memory_gib))


def is_quiet() -> bool:
    """Whether only warnings and errors are wanted."""
    return os.environ.get("HF_ROCM_TUNE_QUIET", "").strip() == "1"


def clear_live_line() -> None:
    """Remove the live line, however training ends; also just before the process ends without unwinding."""
    _close(tuple(getattr(tqdm, "_instances", ())))


def _close(bars: Iterable[Any]) -> None:
    for bar in filter(None, bars):
        bar.leave = False
        bar.close()


def quieten_bars() -> None:
    """Turn off the libraries' progress bars, for output that goes to a file."""
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()


class TerminalCallback(ProgressCallback):
    """Prints a row for each log; ``live``: above upstream's progress bar, which shows the figures of the last one."""

    training_bar: Any
    prediction_bar: Any

    def __init__(self, *, live: bool, memory_gib: float | None) -> None:
        super().__init__()
        self._live = live
        self._memory_gib = memory_gib
        self._columns: list[_Column] = []
        self._width = 0  # of the terminal at the last titles
        self._rows_shown = 0  # since them
        self._bar_columns = 0  # of the terminal when the bar was drawn

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._live:
            super().on_train_begin(args, state, control, **more)
            bar: Any = self.training_bar
            bar.initial = bar.n = self.current_step = state.global_step

    def on_train_end(self, *_: Any, **__: Any) -> None:
        _close([self.prediction_bar, self.training_bar])
        self.training_bar = self.prediction_bar = None

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self.training_bar is not None:
            self._remove_wrapped()
            super().on_step_end(args, state, control, **more)

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._live:
            self._remove_wrapped()
            super().on_prediction_step(args, state, control, **more)

    def _remove_wrapped(self) -> None:
        """A terminal that became narrower has broken the bar into lines, of which a new one would replace the last."""
        before = self._bar_columns
        self._bar_columns = shutil.get_terminal_size().columns
        if self.training_bar is not None and before > self._bar_columns:
            self.training_bar.fp.write(f"\x1b[{(before - 1) // self._bar_columns}A\r\x1b[J")
            for bar in filter(None, (self.training_bar, self.prediction_bar)):
                bar.sp = bar.status_printer(bar.fp)  # knows the length of what it would overwrite

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs:
            return
        self._remove_wrapped()
        step = f"{state.global_step}/{state.max_steps}" if state.max_steps else "0"  # an evaluation before training
        first = max(9, 2 * len(str(state.max_steps)) + 1)
        if "loss" not in logs:
            self._put([step, _sentence(logs)], first)
            return
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(self._figures(logs), refresh=False)
        size = _screen()
        if size.columns != self._width or self._rows_shown >= size.lines - 3:
            self._width = size.columns
            self._rows_shown = 0
            self._columns = self._chosen(logs, first)
            self._put(["step", *(column.title for column in self._columns)], first)
        self._put([step, *(self._cell(logs, column) for column in self._columns)], first)

    def _put(self, cells: list[str], first: int) -> None:
        """Show a row: the titles, figures below them, or a step and a sentence."""
        self._rows_shown += 1
        widths = [first, 0]
        if len(cells) > 2:
            widths = [first, *(column.width for column in self._columns)]
        row = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        row = textwrap.fill(row, _screen().columns, subsequent_indent=" " * (first + 2), break_long_words=False)
        tqdm.write(row, file=sys.stdout)
        sys.stdout.flush()

    def _chosen(self, logs: Mapping[str, Any], first: int) -> list[_Column]:
        """The columns for which this log has values, as many as fit the terminal."""
        columns = [column for column in _COLUMNS if _first(logs, column.keys) is not None]
        while first + sum(column.width + 2 for column in columns) >= self._width and len(columns) > 1:
            columns.remove(min(columns, key=lambda column: column.first_to_drop))
        return columns

    def _cell(self, logs: Mapping[str, Any], column: _Column) -> str:
        value = _first(logs, column.keys)
        if value is None:
            return ""
        text = column.text(value)
        if column.keys is _MEMORY and self._memory_gib:
            text += f"/{self._memory_gib:.1f}"
        return text

    def _figures(self, logs: Mapping[str, Any]) -> str:
        """The figures of the bar, the most important first: as many as leave room for the bar itself."""
        columns = [column for column in _COLUMNS if column.on_bar]
        figures = []
        for column in sorted(columns, key=lambda column: column.on_bar):
            cell = self._cell(logs, column)
            if cell:
                figures.append(f"{column.title} {cell}")
        text = " · ".join(figures)
        room = max(shutil.get_terminal_size().columns - _BAR_COLUMNS, 12)
        if len(text) > room:
            text = text[: room + 3].rpartition(" · ")[0]
        return text


class NotebookCallback(TerminalCallback):
    """The same as one table in the output of the cell, drawn again with each log."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._live = False
        self._table: list[str] = []
        self._drawn: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """A table in the cell that trains."""
        self._table = []
        self._drawn = None
        self._width = 0

    def _put(self, cells: list[str], first: int) -> None:
        from IPython.display import HTML, display

        self._rows_shown += 1
        tag = "th" if cells[0] == "step" else "td"
        attributes = ""
        if len(cells) < 3:  # a sentence
            attributes = f' colspan="{max(len(self._columns), 1)}" style="text-align: left"'
        step, *others = cells
        row = f"<{tag}>{escape(step)}</{tag}>"
        for cell in others:
            row += f"<{tag}{attributes}>{escape(cell)}</{tag}>"
        self._table.append(f"<tr>{row}</tr>")
        table = HTML(f"<table>{''.join(self._table)}</table>")
        if self._drawn is None:
            self._drawn = display(table, display_id=True)  # None where no IPython shell runs
        else:
            self._drawn.update(table)


def _screen() -> os.terminal_size:
    """The terminal's size; a pipe has no end."""
    return shutil.get_terminal_size() if sys.stdout.isatty() else os.terminal_size((sys.maxsize, sys.maxsize))


def _first(values: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    return next((values[key] for key in keys if isinstance(values.get(key), int | float)), None)


def _sentence(logs: Mapping[str, Any]) -> str:
    """One line for a log other than a training step's: an evaluation, the end of training, or a plug-in's."""
    if "train_runtime" in logs:
        loss = f", mean loss {logs['train_loss']:.4f}" if "train_loss" in logs else ""
        return f"trained: {logs['train_runtime']:.1f} s{loss}"
    is_evaluation = any(key.startswith("eval_") for key in logs)
    shown: dict[str, Any] = {}
    for key, value in logs.items():
        if not is_evaluation or (key.startswith("eval_") and key.endswith(_SHOWN_OF_EVALUATIONS)):
            shown[key.removeprefix("eval_").replace("_", " ")] = value
    parts = []
    for name, value in shown.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        parts.append(f"{name} {value}")
    if "eval_runtime" in logs:
        parts.append(f"{logs['eval_runtime']:.1f} s")
    text = ", ".join(parts)
    if is_evaluation:
        text = f"evaluation: {text}"
    return text
