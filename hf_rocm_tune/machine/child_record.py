"""What a child process is to measure, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Status = Literal["done", "timeout", "died", "garbage"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One child to start.

    Attributes:
        module: run with ``python -m``; it ends in ``child_main.answer``.
        arguments: of its command line.
        request: plain JSON values.
        environ: variables beside those of this process; None as a value takes one away. What is read once, when HIP
            starts, can only be set here.
    """

    module: str
    arguments: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    environ: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended.

    Attributes:
        status: ``done``: there is a result; ``timeout``: it had not ended when it had to and was killed; ``died``: it
            ended by a signal, by an exception or without a result; ``garbage``: what it left is no JSON object.
        result: what it measured; None unless ``done``.
        error: type and message of the exception that ended it; empty without one.
        code: its exit code, below 0 the signal that ended it; None where it could not be killed.
        seconds: from its start to its end, the imports included.
        step: what it said last that it was doing.
        state: of a child that had to be killed, the state that the kernel gave before: ``S (sleeping)``, and so on.
        tail: the end of what it printed on stdout and stderr, and of the Python stacks where it could still tell them.
    """

    status: Status
    result: dict[str, Any] | None = None
    error: str = ""
    code: int | None = None
    seconds: float = 0.0
    step: str = ""
    state: str = ""
    tail: str = ""

    @property
    def how(self) -> str:
        """How it ended, in one clause: ``was ended by SIGSEGV while copying 64 MiB to cuda:0``."""
        during = f" while {self.step}" if self.step else ""
        if self.status == "done":
            return f"ended after {self.seconds:.1f} s"
        if self.status == "garbage":
            return f"left a result that cannot be read{during}"
        if self.status == "timeout":
            state = f", in state {self.state}" if self.state else ""
            left = "; it could not be killed" if self.code is None else ""
            return f"had not ended after {self.seconds:.0f} s{during}{state}{left}"
        if self.error:
            return f"ended with {self.error}{during}"
        if self.code is not None and self.code < 0:
            return f"was ended by {_signal_name(-self.code)}{during}"
        return f"ended with exit code {self.code} and no result{during}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
