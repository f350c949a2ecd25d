"""The exceptions of the package, in one tree.

    TuneError                      exit code   what it is for
    ├── UsageError                     2       the user's input is wrong: says what and what to do
    │   └── PictureError               2       of a picture, or of a row with pictures
    ├── CorruptionError                3       wrong bytes that no retry corrected
    │   ├── SourceChangedError         3       the source changed during the copy: not a transfer fault
    │   └── MemoryFaultError           3       verified bytes on the device changed later
    ├── DivergedError                  3       the training diverged; a restart would end in the same way
    ├── StallError                     4       something does not return, or a preflight failed
    ├── OutOfMemoryError               5       it does not fit and cannot be made to fit
    ├── Interrupted                  130       stopped by the user or the system; a checkpoint was written
    └── SeamError                      1       a private upstream seam is missing: our bug, or a new upstream

A message is one line: what is wrong, what was found, what to do next. Foreign exceptions are mapped to these at one
boundary (the entry point), with ``from``.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

RUNTIME_OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation`` and ``hipErrorOutOfMemory``."""
# Out-of-memory messages from outside torch's allocator: driver calls (deepmd-kit#3857) and libraries that allocate for
# themselves (pytorch#128601, TheRock#1708). Not included: CUBLAS_STATUS_NOT_INITIALIZED, more often an index out of
# range (lm-evaluation-harness#1689), and failures within RCCL, whose communicator is unusable afterwards.
_SHORTAGE = re.compile(r"(?:CUDA|HIP)(?: driver)? error: out of memory|(?:BLAS|DNN|SOLVER)\w*_STATUS_ALLOC_FAILED")

#: Errors of modelling code on a configuration or tensor that it does not support.
FOREIGN_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


class TuneError(Exception):
    """Base of the errors that this package raises.

    Args:
        message: one line: what is wrong, what was found, what to do.

    Attributes:
        exit_code: of a process that this error ends.
        follows: whether it is only a consequence of another rank's end.
    """

    exit_code: int = 1
    follows: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UsageError(TuneError):
    """The user's input is wrong. Nothing was changed or overwritten."""

    exit_code = 2


class PictureError(UsageError):
    """A picture, or a row with pictures, that cannot be used.

    Attributes:
        kind: one word; errors of one kind have the same cause.
        picture: the name of the picture, if it is one picture's fault.
    """

    def __init__(self, what: str, *, kind: str = "other", picture: str | None = None) -> None:
        # torch's loader gives the message of a worker's error a traceback in front
        super().__init__(what.rpartition("PictureError: ")[2] if what.startswith("Caught PictureError") else what)
        self.kind = kind
        self.picture = picture

    def __reduce__(self) -> Any:  # a worker of the loader sends it to the main process
        return _picture_error, (str(self), self.kind, self.picture)


def _picture_error(what: str, kind: str, picture: str | None) -> PictureError:
    return PictureError(what, kind=kind, picture=picture)


#: Actions as other programs call them.
_OTHER_WORDS = {"list": "ls", "copy": "cp", "check": "validate", "cat": "show", "print": "show"}


class CommandParser(argparse.ArgumentParser):
    """argparse with its errors as one-line `UsageError`."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UsageError(f"{message}; {self._hint(message)}see `{self.prog} --help`")

    def _hint(self, message: str) -> str:
        """What a mistyped flag or choice was probably meant to be, as a beginning; empty: nothing is near."""
        flag = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        choice = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)$", message)
        if flag:
            given = flag[1]
            known = re.findall(r"--[a-z]\w*", self.format_help())
        elif choice:
            given = _OTHER_WORDS.get(choice[1], choice[1])
            known = re.findall(r"'?([^', ]+)'?", choice[2])
        else:
            return ""
        nearest = difflib.get_close_matches(given, known, n=1)
        if not nearest:
            return ""
        return f"did you mean {nearest[0]}? "


def checked(kind: Callable[[str], Any], holds: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """An argparse type: a value of ``kind`` for which ``holds`` is true; an error says what was ``expected``."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"it must be {expected}, got {text}")
        return value

    return parse


class CorruptionError(TuneError):
    """Bytes arrived wrong, and no retry corrected them."""

    exit_code = 3


class SourceChangedError(CorruptionError):
    """The source of a transfer changed after it was digested: host memory or a file."""


class MemoryFaultError(CorruptionError):
    """Verified bytes on the device changed afterwards.

    Args:
        what: what changed and when it was found.
        advice: what to do when this ends the run.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


class DivergedError(TuneError):
    """Loss, gradients or weights are not finite, or nothing is learned. Nothing of it was saved."""

    exit_code = 3


class StallError(TuneError):
    """A step or a collective does not return, or a preflight failed."""

    exit_code = 4


class OutOfMemoryError(TuneError):
    """The job does not fit in memory and cannot be made to fit."""

    exit_code = 5


class Interrupted(TuneError):
    """The run was stopped (Ctrl-C, SIGTERM) and ended cleanly."""

    exit_code = 130


class SeamError(TuneError):
    """A private place of an upstream library, on which verification depends, has moved."""


def tokenizer_fault(error: BaseException) -> str | None:
    """What a tokenizer's library says of files that it cannot use; None for every other error.

    It is written in Rust: it raises a bare ``Exception``, and its failed assertions are a ``BaseException``.
    """
    panics = type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = str(at.tb_frame.f_globals.get("__name__", "")) if at is not None else ""
    if not panics and (type(error) is not Exception or not module.startswith(("transformers.token", "tokenizers"))):
        return None
    message = " ".join(str(error).split())[:200] or "no reason given"
    return f"the tokenizer cannot be used ({message}): its files are damaged, or not of this model; copy them again"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names and the number of others: ``a, b, c and 2 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def count_of(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 1,200 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def device_shortage(error: BaseException) -> str | None:
    """The first sentence of an error that reports a device out of memory; None for every other error.

    torch raises ``OutOfMemoryError`` where its own allocator finds none, ``AcceleratorError`` with the runtime's code
    where a call to the runtime does, and a plain ``RuntimeError`` where a library does. Imports no torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return None
    text = str(error)
    coded = isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == RUNTIME_OUT_OF_MEMORY
    if not (coded or isinstance(error, torch.OutOfMemoryError) or _SHORTAGE.search(text)):
        return None
    return re.split(r"\. |\n", text.strip(), maxsplit=1)[0].rstrip(".") or "out of device memory"


def shortage_in(text: str) -> str | None:
    """The line of a traceback that is torch's error of a device out of memory, without the error's name."""
    match = re.search(r"OutOfMemoryError: (.+)", text)
    return None if match is None else match[1].strip()


@contextmanager
def shortage_advice(advice: str) -> Iterator[None]:
    """Within the block, an error that reports a device out of memory becomes an `OutOfMemoryError` with this advice."""
    try:
        yield
    except RuntimeError as error:
        shortage = device_shortage(error)
        if shortage is None:
            raise
        raise OutOfMemoryError(f"{shortage}: {advice}") from error
