"""The flags of ``hf-rocm-tune bench``."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import CommandParser, UsageError, checked
from hf_rocm_tune.paths import can_be_file

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PROGRAM = "hf-rocm-tune bench"
_CHOSEN = "(default: chosen for the device)"


def main(argv: Sequence[str], *, trainer_class: Callable[[], Callable[..., Any]]) -> int:
    wanted = _parser().parse_args(list(argv))
    wanted.command = shlex.join([*_PROGRAM.split(), *argv])
    if (path := wanted.json_file) is not None and not can_be_file(path):
        raise UsageError(f"--json {path}: give a file in a directory that exists")
    if wanted.bench == "transfer":
        from hf_rocm_tune.bench import transfers

        transfers.run(wanted)
    elif wanted.bench == "load":
        from hf_rocm_tune.bench import loads

        loads.run(wanted)
    elif wanted.bench == "comm":
        from hf_rocm_tune.bench import comm

        comm.run(wanted)
    elif wanted.bench == "sft":
        from hf_rocm_tune.bench import sft

        sft.run(wanted)
    else:
        trainer = trainer_class()  # first: it prepares the process before anything else is imported
        from hf_rocm_tune.bench import steps

        steps.run(wanted, trainer)
    return 0


def byte_size(text: str, *, least: int = 0) -> int:
    """``65536``, ``64K``, ``64KiB``, ``1.5GiB`` as bytes; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or less than the least.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 65536, 64KiB, 16MiB or 1GiB")
    number = float(found[1]) * _UNITS[found[2].upper()]
    if number >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text:.20} ... is too large a size")
    if (size := int(number)) < least:
        raise argparse.ArgumentTypeError(f"{size} bytes are too few; give at least {least >> 10} KiB")
    return size


def _number(least: int, multiple: int = 1) -> Callable[[str], int]:
    what = "whole number" if multiple == 1 else f"multiple of {multiple}"
    return checked(int, lambda value: value >= least and value % multiple == 0, f"a {what}, at least {least}")


_gib = checked(float, lambda value: 0 < value < math.inf, "a number of GiB above 0")
_folder = checked(Path, os.path.isdir, "a directory with room for the checkpoint")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog=_PROGRAM, description="Measure transfers, loading, steps and averages on this machine.")
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="transfer|load|step|comm|sft")
    transfer = kinds.add_parser("transfer", help="copies by size: raw, torch, accelerate, ours")
    load = kinds.add_parser("load", help="an 8B-shaped checkpoint: stock from_pretrained and ours")
    step = kinds.add_parser("step", help="training steps: verified and unverified")
    comm = kinds.add_parser("comm", help="two processes: averages by size and way, training on one and two ranks")
    sft = kinds.add_parser("sft", help="fine-tuning: a bare loop, trl sft, ours unverified, verified and auto-fitted")
    for each in (transfer, load, step, comm, sft):
        each.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first accelerator, else cpu)")
        each.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="write the JSON object here too")

    size = "largest copy (default: 1GiB on an accelerator, 64MiB on the CPU)"
    transfer.add_argument("--max_size", type=lambda text: byte_size(text, least=4 << 10), metavar="SIZE", help=size)
    transfer.add_argument("--repeats", type=_number(1), default=7, help="timings of each way and size (default: 7)")

    scale = "fraction of the 8B model's parameters (default: by free memory and disk; 1.2 GB on the CPU)"
    load.add_argument("--scale", type=float, help=scale)
    load.add_argument("--repeats", type=_number(1), default=3, help="loads of each side (default: 3)")
    modes = ("full", "sample", "off")
    load.add_argument("--verify", choices=modes, default="full", help="what ours verifies (default: full)")
    load.add_argument("--load_in_4bit", action="store_true", help="NF4 on both sides")
    where = "where the checkpoint is built and removed (default: the system's temporary directory)"
    load.add_argument("--dir", type=_folder, dest="directory", metavar="DIR", help=where)

    _model_flags(step, rows="rows of a batch")
    step.add_argument("--turns", type=_number(1), default=16, help="turns of each trainer (default: 16)")
    step.add_argument("--steps", type=_number(1), default=4, help="measured steps per turn (default: 4)")
    sentinel = "as in sft, for the trainers that verify (default: 50)"
    step.add_argument("--sentinel_every", type=_number(0), default=50, help=sentinel)

    largest, least = "largest (default: 64MiB)", 1 << 10
    comm.add_argument(
        "--max_size", type=lambda text: byte_size(text, least=least), default=64 << 20, metavar="SIZE", help=largest
    )
    comm.add_argument("--repeats", type=_number(1), default=7, help="timings of each way and size (default: 7)")
    _model_flags(comm, rows="rows of a rank's batch")
    turns = "turns of each training; 0: no training (default: 8)"
    comm.add_argument("--turns", type=_number(0), default=8, help=turns)
    comm.add_argument("--steps", type=_number(1), default=3, help="steps per turn (default: 3)")

    named = "Hub id or directory (default: a small, untrained Llama)"
    sft.add_argument("--model", metavar="NAME", help=named)
    _model_flags(sft, rows="rows of a step")
    sft.add_argument("--turns", type=_number(1), default=3, help="runs of each side (default: 3)")
    sft.add_argument("--steps", type=_number(2), default=20, help="steps of a run (default: 20)")
    sft.add_argument("--load_in_4bit", action="store_true", help="QLoRA: NF4 on all sides")
    dropout = "each side's own default of --lora_dropout, 0.05 of trl sft and 0 of ours (default: 0 for all)"
    sft.add_argument("--own_dropout", action="store_true", help=dropout)
    sft.add_argument("--gib", type=_gib, help="memory that auto_fit plans for (default: the card's; 16 on the CPU)")
    sides = ("bare", "off", "full", "plan")
    sft.add_argument("--sides", nargs="+", choices=sides, default=sides, help="sides beside trl sft (default: all)")
    return parser


def _model_flags(parser: argparse.ArgumentParser, *, rows: str) -> None:
    width = f"width of the Llama that is trained, a multiple of 64 {_CHOSEN}"
    parser.add_argument("--hidden", type=_number(64, 64), help=width)
    parser.add_argument("--layers", type=_number(1), help=f"its layers {_CHOSEN}")
    parser.add_argument("--batch", type=_number(1), help=f"{rows} {_CHOSEN}")
    parser.add_argument("--seq", type=_number(1), help=f"tokens of a row {_CHOSEN}")
