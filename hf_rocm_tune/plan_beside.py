"""Several pieces of one computation at once: the first in this process, each other in a forked one of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from hf_rocm_tune.machine.process import has_accelerator

T = TypeVar("T")


def worthwhile() -> bool:
    """Whether a second process has a core to run on, and this process can be forked. Imports torch.

    Where torch sees a GPU it cannot: the runtime of HIP or CUDA does not survive that, and autograd starts a thread for
    each GPU, whatever it is asked for.
    """
    return len(os.sched_getaffinity(0)) > 1 and not has_accelerator()


def at_once(work: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
    """What ``work`` gives for each name.

    Args:
        work: gives something that can be pickled. It must start no threads.
        names: one piece of work each; the first is done here.

    Returns:
        By name. One whose process failed, whatever for, is left out: whoever does it here meets the error itself.

    Raises:
        Exception: what the first raises.
    """
    context = multiprocessing.get_context("fork")
    first, *others = names
    started = []
    for name in others:
        answers, answer = context.Pipe(duplex=False)
        process = context.Process(target=_do, args=(work, name, answer), daemon=True)
        process.start()
        answer.close()
        started.append((name, process, answers))
    try:
        found = {first: work(first)}
        for name, _, answers in started:
            with suppress(EOFError):
                found[name] = answers.recv()
        return found
    finally:
        for _, process, answers in started:
            answers.close()
            process.kill()
            process.join()


def _do(work: Callable[[str], T], name: str, answer: Connection) -> None:
    with suppress(Exception, KeyboardInterrupt), answer:
        answer.send(work(name))
