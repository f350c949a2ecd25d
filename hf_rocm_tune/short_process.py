"""What a process leaves out that only works something out and ends: a third of the time of ``hf-rocm-tune plan``.

Python's garbage collector looks through all that torch and transformers have imported, again and again and once more
at the end, and finds next to nothing. bitsandbytes compiles four functions for CPUs when it is imported, and for that
loads torch's whole compiler.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: torch 2.13, ``_dynamo/eval_frame.py``: with it ``torch.compile`` gives a function back as it is.
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def short_process() -> Iterator[None]:
    """Within the block nothing is collected or compiled; what is there at its end is never collected."""
    before, collecting = os.environ.get(_NO_COMPILER), gc.isenabled()
    os.environ[_NO_COMPILER] = "1"
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
        os.environ.pop(_NO_COMPILER)
        if before is not None:
            os.environ[_NO_COMPILER] = before
