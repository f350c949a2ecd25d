"""What makes a command start, and end, quickly: a quarter of the time of a short one.

Python's garbage collector looks through all that torch and the Hugging Face libraries import, again and again while
they do, in long training now and then, and once more at the end; it finds next to nothing. bitsandbytes compiles four
functions for CPUs when it is imported, and for that loads torch's whole compiler.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: torch 2.13, ``_dynamo/eval_frame.py``: with it ``torch.compile`` gives a function back as it is.
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected within the block, and what is there at its end never will be: for the imports of a process.

    Where torch is there before, the process is not ours alone (a notebook's, for example), and nothing is changed.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within the block ``torch.compile`` does nothing: for a process that computes nothing."""
    before = os.environ.get(_NO_COMPILER)
    os.environ[_NO_COMPILER] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_COMPILER)
        if before is not None:
            os.environ[_NO_COMPILER] = before
