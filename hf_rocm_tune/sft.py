"""Supervised fine-tuning: ``accelerate launch -m hf_rocm_tune.sft`` (or ``hf-rocm-tune sft``); and the start of others.

``hf_rocm_tune.dpo``, ``kto``, ``orpo``, ``reward`` and ``grpo`` start here with their method. Only the start: names of
flags are checked and variables of a recipe applied before torch is imported, and one boundary turns errors into one
line and an exit code. The run itself is told in :mod:`hf_rocm_tune.job.run`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from hf_rocm_tune.lifecycle.exits import run_guarded, sigterm_as_interrupt
from hf_rocm_tune.lifecycle.heartbeat import outlive_reader
from hf_rocm_tune.machine import process, torch_build, torchvision, variables
from hf_rocm_tune.redaction import print_line
from hf_rocm_tune.settings.recipes import apply_environment, given_value
from hf_rocm_tune.settings.start import answered, show_all_cards

if TYPE_CHECKING:
    from hf_rocm_tune.data.formats import Method


def main(argv: Sequence[str] | None = None, *, method: Method = "sft") -> int:
    """Runs one training job.

    Args:
        argv: the command line without the program's name; ``sys.argv`` unless given.
        method: what trains.

    Returns:
        The exit code: 0 done, 2 wrong input, 3 corruption that could not be recovered, 4 stall, 5 out of memory,
        130 interrupted by Ctrl-C, SIGTERM or SIGHUP; 1 for a bug of ours, with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        outlive_reader()
    return run_guarded(lambda: _start(arguments, method, own=argv is None), argv=arguments, process_ends=argv is None)


@sigterm_as_interrupt()
def _start(argv: list[str], method: Method, *, own: bool) -> int:
    if answered(method, argv):
        return 0
    if sys.stderr.isatty():
        os.environ.setdefault("TQDM_LEAVE", "")  # tqdm's own: bars of libraries go when they are full
    before = dict(os.environ)
    apply_environment(argv, os.environ)
    if os.environ != before:
        # The policy looked at the environment without the recipe's part.
        variables.announce(variables.review())
    show_all_cards(argv, os.environ)
    with uncollected() if own else nullcontext():
        prepare(given_value(argv, "model_name_or_path"))
        from hf_rocm_tune.job import run as job

    return job.run(argv, method=method)


def prepare(model: str | None = None) -> None:
    """Before the libraries are imported: or they remark on this machine's lack of a GPU, or fail in a traceback.

    ``model``: the name of the model or adapter that the command is about, where it is known.
    """
    torch_build.check_torch()
    process.prepare_process(os.environ)
    misfit = torchvision.hide_unless_used(model)
    if misfit is not None:
        print_line(f"hf-rocm-tune: warning: {misfit}")
    process.check_bitsandbytes()  # PEFT imports it


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected within the block, and what is there at its end never will be: for the imports of a process.

    Python's garbage collector looks through all that torch and the Hugging Face libraries import, again and again while
    they do and once more at the end: a quarter of the time of a short command. Only for a process that is ours alone.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
