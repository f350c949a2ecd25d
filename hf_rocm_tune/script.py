"""Any training script, unmodified, with every copy verified: ``accelerate launch -m hf_rocm_tune.script FILE [ARGS]``.

Or ``hf-rocm-tune script FILE [ARGS]``. Nothing in the script needs to know of it: copies are verified at torch's
dispatcher, and each optimizer is watched from its first step on through torch's public hooks, with the frozen weights
of the models that the program holds then. ``transfer_report.json`` is written into the script's ``--output_dir``, where
it has one, else into the current directory.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.lifecycle.exits import PROGRAM, run_guarded, sigterm_as_interrupt
from hf_rocm_tune.redaction import print_line

if TYPE_CHECKING:
    from torch import nn

    from hf_rocm_tune.engine import VerifiedTransfers

USAGE = f"""usage: {PROGRAM} script [LAUNCHER FLAGS] FILE [ARGS]

Runs a Python training script, unmodified, and verifies every copy between host and card. Launcher flags are those of
`accelerate launch`; all that follows FILE is the script's. Exit codes: the script's own; 2 wrong usage; 3 corruption
that could not be recovered; 5 out of memory. {PROGRAM} run restarts only training verbs: a script that cannot resume
would begin anew.
"""
_OUTPUT_FLAGS = ("--output_dir", "--output-dir", "--project_dir", "--save_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script in this process. Returns its exit code, or ours (see `errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda: _run(arguments), argv=arguments, process_ends=argv is None)


def check_file(name: str) -> Path:
    """The script. Raises `UsageError` for what is no readable file."""
    file = Path(name)
    if not file.is_file():
        raise UsageError(f"script: {name} is not a file: give the path of a Python script, then its arguments")
    return file


@sigterm_as_interrupt()
def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    file = check_file(argv[0])
    from hf_rocm_tune.machine import process
    from hf_rocm_tune.machine.torch_build import check_torch

    check_torch()
    process.prepare_process(os.environ)
    with _transfers() as transfers:
        try:
            code = _execute(file, argv)
            transfers.check()
        finally:
            _write_report(transfers, argv[1:])
    return code


def _transfers() -> VerifiedTransfers:
    """The engine of this process's card, and one for each other card that is used."""
    import torch

    from hf_rocm_tune.engine import VerifiedTransfers
    from hf_rocm_tune.transfer import FaultSpec, Mover
    from hf_rocm_tune.transfer.interception import serve_others_with

    if not torch.cuda.is_available():
        transfers = VerifiedTransfers("cpu")
    else:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        transfers = VerifiedTransfers(f"cuda:{min(rank, torch.cuda.device_count() - 1)}")
        serve_others_with(lambda card: Mover(card, report=transfers.report, faults=FaultSpec.from_environment()))
    watch_all_optimizers(transfers)
    return transfers


def watch_all_optimizers(transfers: VerifiedTransfers) -> None:
    """Watch each optimizer of this process from its next step on, and the models that the program holds then."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(optimizer: Any, *_: Any) -> None:
        if not transfers.watches(optimizer):
            transfers.watch(*_models(), optimizer)

    register_optimizer_step_pre_hook(before_step)


def _models() -> list[nn.Module]:
    """The modules of this process that are in no other module."""
    from torch import nn

    # By type: `isinstance` asks lazy objects of other libraries for their class, and some warn.
    modules = [
        module for module in gc.get_objects() if issubclass(type(module), nn.Module) and "_modules" in vars(module)
    ]
    inside = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inside and any(True for _ in module.parameters())]


def _execute(file: Path, argv: list[str]) -> int:
    """Run the file as ``python FILE ARGS`` would."""
    before, path = list(sys.argv), list(sys.path)
    sys.argv[:] = argv
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv[:], sys.path[:] = before, path
    return 0


def _write_report(transfers: VerifiedTransfers, argv: list[str]) -> None:
    rank = int(os.environ.get("RANK", "0"))
    directory = _output_directory(argv)
    if rank:
        directory = directory / f"rank{rank}"
    known = directory / "transfer_report.json"
    if known.exists() and not _is_report(known):
        print_line(f"{PROGRAM}: {known} is not a report of ours and is kept: no report is written", sys.stderr)
        return
    written = transfers.write_report(directory)
    content = transfers.describe()
    covered, crossed = content["coverage"]["verified_bytes"], content["coverage"]["crossed_bytes"]
    wrong = sum(row["mismatches"] for row in content.values() if isinstance(row, dict) and "mismatches" in row)
    share = "nothing crossed" if not crossed else f"{covered:,} of {crossed:,} bytes that crossed are verified"
    print_line(f"{PROGRAM}: {share}, {int(wrong)} mismatches; report: {written}", sys.stderr)


def _output_directory(argv: list[str]) -> Path:
    for number, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in _OUTPUT_FLAGS and (equals or number + 1 < len(argv)):
            directory = Path(value if equals else argv[number + 1])
            if directory.is_dir():
                return directory
    return Path.cwd()


def _is_report(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"schema", "coverage", "incidents"} <= content.keys()


if __name__ == "__main__":
    sys.exit(main())
