"""The exceptions of the package, in one tree.

    TuneError                      exit code   what it is for
    ├── UsageError                     2       the user's input is wrong: says what and what to do
    ├── CorruptionError                3       bytes that were wrong and could not be made right
    │   ├── SourceChangedError         3       the source changed under the copy: not a transfer fault
    │   └── MemoryFaultError           3       bytes that were right on the device no longer are
    ├── DivergedError                  3       the numbers of the training are of no use any more: starting again as
    │                                          it is would end the same way
    ├── StallError                     4       something does not return, or a preflight failed
    ├── OutOfMemoryError               5       it does not fit and cannot be made to
    ├── Interrupted                  130       the user or the system asked for the end; what was done is kept
    └── SeamError                      1       a private upstream seam is missing: our bug, or a new upstream

A message is one line: what is wrong, what was found, what to do next. Foreign exceptions are turned into these
at one boundary (the entry point), with ``from``, so nothing is lost for a bug report.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

RUNTIME_OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation`` and ``hipErrorOutOfMemory``."""
# What a device says that has no memory left where torch's allocator was not the one to be asked: calls to the driver
# (deepmd-kit#3857), and libraries that allocate for themselves (pytorch#128601, TheRock#1708). Not here:
# CUBLAS_STATUS_NOT_INITIALIZED, which more often is an index out of range (lm-evaluation-harness#1689), and a failure
# within RCCL, after which its communicator is of no use.
_SHORTAGE = re.compile(r"(?:CUDA|HIP)(?: driver)? error: out of memory|(?:BLAS|DNN|SOLVER)\w*_STATUS_ALLOC_FAILED")


class TuneError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: one line that says what is wrong, what was found and what to do.

    Attributes:
        exit_code: what our own process returns when this ends it.
    """

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UsageError(TuneError):
    """The user's input is wrong. Nothing was changed or overwritten."""

    exit_code = 2


class CommandParser(argparse.ArgumentParser):
    """argparse with its errors as `UsageError`: one line; the usage is one ``--help`` away."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


class CorruptionError(TuneError):
    """Bytes arrived wrong, and no way of sending them again made them right."""

    exit_code = 3


class SourceChangedError(CorruptionError):
    """The source of a transfer no longer has the bytes that were digested: host memory or a file changed."""


class MemoryFaultError(CorruptionError):
    """Bytes that were verified on the device have changed there since.

    Args:
        what: what changed and when it was found.
        advice: what to do when the run ends here.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


class DivergedError(TuneError):
    """Loss, gradients or weights are not finite, or nothing is learned. None of it was saved."""

    exit_code = 3


class StallError(TuneError):
    """A step or a collective does not return, or a preflight failed."""

    exit_code = 4


class OutOfMemoryError(TuneError):
    """The work does not fit in memory and cannot be made to fit."""

    exit_code = 5


class Interrupted(TuneError):
    """The run was asked to end (Ctrl-C, SIGTERM) and has ended in good order."""

    exit_code = 130


class SeamError(TuneError):
    """A private place of an upstream library, on which verification depends, is not where it was."""


def device_shortage(error: BaseException) -> str | None:
    """The first sentence of an error that says that a device has no memory left; None for every other error.

    torch raises ``OutOfMemoryError`` where its own allocator finds none, ``AcceleratorError`` with the runtime's code
    where a call to the runtime does, and a plain ``RuntimeError`` where a library does. Imports no torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):  # where it was not imported, it raised nothing
        return None
    text = str(error)
    coded = isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == RUNTIME_OUT_OF_MEMORY
    if not (coded or isinstance(error, torch.OutOfMemoryError) or _SHORTAGE.search(text)):
        return None
    return re.split(r"\. |\n", text.strip(), maxsplit=1)[0].rstrip(".") or "out of device memory"
