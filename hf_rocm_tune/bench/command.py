"""The flags of ``hf-rocm-tune bench``."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_rocm_tune.errors import UsageError

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PROGRAM = "hf-rocm-tune bench"


def main(argv: Sequence[str], *, trainer_class: Callable[[], Callable[..., Any]]) -> int:
    """Run one benchmark.

    Args:
        argv: the arguments behind ``bench``.
        trainer_class: gives the verified SFT trainer; called by ``step`` only, because it imports much.

    Returns:
        0; whatever goes wrong is raised.
    """
    wanted = vars(_parser().parse_args(list(argv)))
    which = wanted.pop("bench")
    command = shlex.join([*_PROGRAM.split(), *argv])
    _check_files(wanted["json_file"], wanted.get("plot"))
    if which == "transfer":
        from hf_rocm_tune.bench import transfers

        files = {name: wanted.pop(name) for name in ("json_file", "plot")}
        transfers.run(transfers.TransferBench(**wanted), command, **files)
    elif which == "load":
        from hf_rocm_tune.bench import loads

        files = {name: wanted.pop(name) for name in ("json_file", "plot")}
        loads.run(loads.LoadBench(**{**wanted, "caches": tuple(wanted["caches"])}), command, **files)
    elif which == "comm":
        from hf_rocm_tune.bench import comm

        json_file = wanted.pop("json_file")
        comm.run(comm.CommBench(**wanted), command, json_file=json_file)
    else:
        trainer = trainer_class()  # first: it prepares the process before anything else is imported
        from hf_rocm_tune.bench import steps

        json_file = wanted.pop("json_file")
        steps.run(steps.StepBench(**wanted), command, json_file=json_file, trainer_class=trainer)
    return 0


def byte_size(text: str) -> int:
    """``65536``, ``64K``, ``64KiB``, ``1.5GiB`` as bytes; units are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 65536, 64KiB, 16MiB or 1GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written, before anything is measured."""
    from hf_rocm_tune.bench.plots import check_plot
    from hf_rocm_tune.bench.result import check_writable

    check_writable(json_file, "--json")
    check_writable(plot, "--plot")
    check_plot(plot)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Measure transfers, loading, steps and averages on this machine.")
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="transfer|load|step|comm", parser_class=_Parser)
    _transfer_flags(kinds.add_parser("transfer", help="copies by size: raw, torch, accelerate, ours"))
    _load_flags(kinds.add_parser("load", help="an 8B-shaped checkpoint: stock from_pretrained and ours"))
    _step_flags(kinds.add_parser("step", help="training steps: verified and unverified"))
    _comm_flags(kinds.add_parser("comm", help="two processes: averages by size and way, training on one and two ranks"))
    return parser


def _transfer_flags(parser: argparse.ArgumentParser) -> None:
    _common_flags(parser, plot=True)
    size = "largest copy (default: 1GiB on an accelerator, 64MiB on the CPU)"
    parser.add_argument("--max_size", type=byte_size, metavar="SIZE", help=size)
    parser.add_argument("--repeats", type=int, default=7, help="timings of each way and size (default: 7)")


def _load_flags(parser: argparse.ArgumentParser) -> None:
    _common_flags(parser, plot=True)
    scale = "share of the 8B model's parameters (default: what free memory and disk allow; 1.2 GB on the CPU)"
    parser.add_argument("--scale", type=float, help=scale)
    parser.add_argument("--repeats", type=int, default=3, help="loads of each side and cache state (default: 3)")
    caches, modes = ("warm", "cold"), ("full", "sample", "off")
    states = "states of the page cache (default: both)"
    parser.add_argument("--caches", nargs="+", choices=caches, default=caches, help=states)
    parser.add_argument("--verify", choices=modes, default="full", help="what ours verifies (default: full)")
    parser.add_argument("--load_in_4bit", action="store_true", help="NF4 on both sides")
    where = "where the checkpoint is built, and removed again (default: the system's temporary directory)"
    parser.add_argument("--dir", type=Path, dest="directory", metavar="DIR", help=where)


def _step_flags(parser: argparse.ArgumentParser) -> None:
    _common_flags(parser, plot=False)
    chosen = "(default: chosen for the device)"
    parser.add_argument("--hidden", type=int, help=f"width of the Llama, a multiple of 64 {chosen}")
    parser.add_argument("--layers", type=int, help=f"its layers {chosen}")
    parser.add_argument("--batch", type=int, help=f"rows of a batch {chosen}")
    parser.add_argument("--seq", type=int, help=f"tokens of a row {chosen}")
    parser.add_argument("--turns", type=int, default=16, help="stretches of each trainer (default: 16)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a stretch (default: 4)")
    sentinel = "as in sft, for the trainers that verify (default: 50)"
    parser.add_argument("--sentinel_every", type=int, default=50, help=sentinel)


def _comm_flags(parser: argparse.ArgumentParser) -> None:
    _common_flags(parser, plot=False)
    parser.add_argument("--max_size", type=byte_size, default=64 << 20, metavar="SIZE", help="largest (default: 64MiB)")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each way and size (default: 7)")
    chosen = "(default: chosen for the device)"
    parser.add_argument("--hidden", type=int, help=f"width of the Llama that is trained, a multiple of 64 {chosen}")
    parser.add_argument("--layers", type=int, help=f"its layers {chosen}")
    parser.add_argument("--batch", type=int, help=f"rows of a rank's batch {chosen}")
    parser.add_argument("--seq", type=int, help=f"tokens of a row {chosen}")
    parser.add_argument("--turns", type=int, default=8, help="stretches of each training; 0: no training (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a stretch (default: 3)")


def _common_flags(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first accelerator, else cpu)")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="write the JSON object here too")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it; needs the extra `plots`")


class _Parser(argparse.ArgumentParser):
    """argparse with its errors as ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        """Say it in one line; the usage is one ``--help`` away."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
