"""Output of all benchmarks: the machine, medians and spreads, a table, and one JSON object as the last line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.version import __version__

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Figures = dict[str, Any]

_PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "safetensors")
_ON_HOST = "cpu (no accelerator: host memory stands in for the device)"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Statistics of samples; quartiles by the inclusive method."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of one or more samples."""
        q1, median, q3 = (
            statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        )
        return cls(median=median, q1=q1, q3=q3, min=min(samples), max=max(samples), n=len(samples))

    def to_dict(self) -> Figures:
        """Plain JSON values, to six significant digits."""
        return {name: value if name == "n" else float(f"{value:.6g}") for name, value in asdict(self).items()}

    def show(self, digits: int = 3, scale: float = 1.0, *, quartiles: bool = False) -> str:
        """``median (min .. max)``, or with quartiles instead of the extremes, each times `scale`."""
        ends = (self.q1, self.q3) if quartiles else (self.min, self.max)
        middle, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, *ends))
        return f"{middle} ({low} .. {high})"


def ratios(samples: Sequence[float], reference: Sequence[float]) -> Spread:
    """The spread of ``samples[i] / reference[i]``, pair by pair."""
    return Spread.of([one / other for one, other in zip(samples, reference, strict=True)])


def show_bytes(nbytes: int) -> str:
    """``4 KiB``, ``64 MiB``, ``1 GiB``: powers of 1024, as sizes of buffers are given."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def sizes(smallest: int, largest: int) -> list[int]:
    """The smallest, four times that, and so on; `largest` is the last."""
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= 4
    return [*found, largest]


def in_turns(names: Iterable[str], turns: int) -> Iterator[tuple[int, str]]:
    """Turn and name: each name once per turn, in rotated order; turn 0 warms up."""
    order = list(names)
    for turn in range(turns + 1):
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            yield turn, name


def table(columns: Mapping[str, Callable[[Figures], Any]], rows: Iterable[Figures]) -> str:
    """A table as text of any width: a function of the row for each header. The first column is left-aligned."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for at, name in enumerate(columns):
        drawn.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(escape(str(show(row))) for show in columns.values()))
    console = Console(width=1000, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def verdict(seen: float, noise: float, goal: float) -> str:
    """Judges a ratio against a goal, given the ratio of the reference against itself."""
    if abs(noise - 1) > goal - 1:
        return "not conclusive: the machine is too noisy"
    return "reached" if seen <= goal else "not reached"


def progress(text: str) -> None:
    """Print progress to stderr; stdout holds the result."""
    print(text, file=sys.stderr, flush=True)


def publish(
    wanted: Namespace,
    machine: Figures,
    settings: Figures,
    rows: list[Figures],
    table: str,
    notes: Sequence[str] = (),
    left_out: Sequence[dict[str, str]] = (),
) -> None:
    """Print machine, table, notes and, as the last line, the JSON object; write it to ``--json`` too.

    ``settings`` are choices beside the flags, ``table`` is the text of ``rows``, and ``left_out`` names ``what`` was
    not measured and the ``reason``.
    """
    flags = {name: value for name, value in vars(wanted).items() if name not in ("bench", "command", "json_file")}
    print(f"{wanted.command}\n{_summary(machine)}\n\n{table}\n")
    for note in notes:
        print(f"note: {note}")
    for row in left_out:
        print(f"left out: {row['what']}: {row['reason']}")
    result = {
        "schema": 1,
        "bench": wanted.bench,
        "command": wanted.command,
        "machine": machine,
        "settings": flags | settings,
        "rows": rows,
        "notes": list(notes),
        "left_out": list(left_out),
    }
    text = json.dumps(result, default=lambda value: value.to_dict() if isinstance(value, Spread) else str(value))
    print(text, flush=True)
    if (file := wanted.json_file) is not None:
        try:
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--json {file} cannot be written: {error.strerror}; the last line has the result"
            ) from error


VOCABULARY = 4096


def small_llama(hidden: int, layers: int, seq: int) -> LlamaForCausalLM:
    """A small, untrained Llama with heads of 64 and ``VOCABULARY`` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 64
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
            vocab_size=VOCABULARY,
            max_position_embeddings=max(seq, 128),
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for rows of token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


# ---- the machine ------------------------------------------------------------------------------------------------


def choose_device(name: str | None) -> torch.device:
    """The device to measure: the requested one, else the first accelerator, else the CPU.

    Raises:
        UsageError: torch does not see the requested device.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: there is no such device; give cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:1 (HIP devices have that name too)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise UsageError(f"--device {name}: torch sees {seen} accelerators; see `hf-rocm-tune env`")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe(device: torch.device) -> Figures:
    """Card, processor, memory, load and versions; memory in 10^9 bytes; None for what cannot be read."""
    card: Figures = {"device": _ON_HOST, "device_memory_gb": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = {"device": properties.name, "device_memory_gb": round(properties.total_memory / 1e9, 1)}
    versions: dict[str, str | None] = {"hf-rocm-tune": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        **card,
        "accelerators": torch.cuda.device_count(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "versions": {**versions, "hip": torch.version.hip, "cuda": torch.version.cuda},
    }


def _summary(machine: Figures) -> str:
    versions = machine["versions"]
    build = f"torch {versions['torch']}, transformers {versions['transformers']}, python {versions['python']}"
    host = f"{machine['processor'] or 'unknown processor'}, {machine['cores']} cores, {machine['memory_gb']} GB"
    return f"{machine['device']}; {host}, load {machine['load_average_at_start']}; {build}"


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, None)
