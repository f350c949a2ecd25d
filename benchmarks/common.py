"""What the benchmarks share: the machine, medians and spreads, tables, and a result whose last line is one JSON object.

Import it before torch: importing `hf_rocm_tune` chooses the card, and with it that of every child process, so that an
integrated GPU beside it is never measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hf_rocm_tune  # noqa: F401  # chooses the card
from hf_rocm_tune.errors import CommandParser, TuneError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

Figures = dict[str, Any]
VOCABULARY = 4096
_PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "safetensors")


def main(run: Callable[[argparse.Namespace], Figures], description: str | None, flags: dict[str, Figures]) -> None:
    """Parse the flags, measure, print what `run` returns as one JSON line and write it to ``--json`` too.

    ``flags``: name and arguments of ``add_argument``. ``run`` prints its own table and returns its figures.
    """
    parser = CommandParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the card, else the CPU")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="write the JSON object here too")
    for name, more in flags.items():
        parser.add_argument(f"--{name}", **more)
    wanted = parser.parse_args()
    try:
        if wanted.json_file is not None and not wanted.json_file.absolute().parent.is_dir():
            raise UsageError(f"--json {wanted.json_file}: give a file in a directory that exists")
        wanted.device = device_of(wanted.device)
        settings = {name: value for name, value in vars(wanted).items() if name != "json_file"}
        machine = describe(wanted.device)
        print(" ".join(["python", *sys.argv]), machine, sep="\n", end="\n\n")
        found = {"command": " ".join(["python", *sys.argv]), "machine": machine, "settings": settings, **run(wanted)}
        text = json.dumps(found, default=str)
        if wanted.json_file is not None:
            wanted.json_file.write_text(text + "\n", encoding="utf-8")
    except TuneError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"\n{text}", flush=True)


def device_of(name: str | None) -> torch.device:
    """The named kind of device, or the card where there is one."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no card")
    return torch.device("cpu") if name == "cpu" or not torch.cuda.is_available() else torch.device("cuda", 0)


def describe(device: torch.device) -> Figures:
    """Card, processor, load and versions."""
    import psutil
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    on_card = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_card else "cpu: host memory plays the device",
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), "hip": torch.version.hip, "cuda": torch.version.cuda}
        | {name: metadata.version(name) for name in _PACKAGES},
    }


def in_turns(names: Iterable[str], turns: int) -> Iterator[tuple[int, str]]:
    """Turn and name: each name once a turn, in rotated order; turn 0 warms up."""
    order = list(names)
    for turn in range(turns + 1):
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            yield turn, name


def spread(samples: Sequence[float]) -> Figures:
    """Median, extremes and number of samples, to six significant digits."""
    found = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return {name: float(f"{value:.6g}") for name, value in found.items()} | {"n": len(samples)}


def ratios(samples: Sequence[float], reference: Sequence[float]) -> Figures:
    """The spread of ``samples[i] / reference[i]``, pair by pair."""
    return spread([one / other for one, other in zip(samples, reference, strict=True)])


def show(found: Figures, digits: int = 2, scale: float = 1.0) -> str:
    """``median (min .. max)``."""
    middle, low, high = (f"{found[name] * scale:.{digits}f}" for name in ("median", "min", "max"))
    return f"{middle} ({low} .. {high})"


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The first column left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip(), flush=True)


def small_llama(hidden: int, layers: int, seq: int) -> LlamaForCausalLM:
    """A small, untrained Llama with heads of 64 and `VOCABULARY` tokens; ``hidden`` is a multiple of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 64
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
            vocab_size=VOCABULARY, max_position_embeddings=max(seq, 128), pad_token_id=0, bos_token_id=1,
            eos_token_id=1,
        )
    )  # fmt: skip
