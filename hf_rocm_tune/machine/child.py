"""A measurement in a child process: what hangs, is killed or prints nonsense takes only the child along.

A driver that hangs and a GPU fault that ends the process are normal outcomes of a measurement, so each is made by
``python -m MODULE`` in a session of its own, with a deadline, after which its whole process group is killed. The
request goes in as JSON on stdin, the result comes back as one JSON object in a file of its own: what native libraries
print on stdout and stderr is kept as evidence, and cannot spoil it.

The child's half is ``child_main``; ``child_process`` is one child as seen from here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hf_rocm_tune.machine.child_device import device_of
from hf_rocm_tune.machine.child_main import DIRECTORY, ENDINGS, RESULT, answer, step
from hf_rocm_tune.machine.child_process import Child
from hf_rocm_tune.machine.child_record import Outcome, Task

__all__ = [
    "DIRECTORY",
    "ENDINGS",
    "RESULT",
    "Outcome",
    "Task",
    "answer",
    "device_of",
    "run",
    "run_groups",
    "run_together",
    "step",
]

_POLL_SECONDS = 0.02
_STACK_SECONDS = 0.5


def run(
    module: str,
    *arguments: str,
    request: Mapping[str, Any],
    deadline_s: float,
    environ: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Run one child to its end or to its deadline.

    Args:
        module: see `Task`, as the other arguments.
        deadline_s: seconds, starting Python and the imports included.
    """
    task = Task(module=module, arguments=arguments, request=request, environ=environ or {})
    return run_together([task], deadline_s=deadline_s)[0]


def run_together(tasks: Sequence[Task], *, deadline_s: float, grace_s: float = 5.0) -> list[Outcome]:
    """Run children that wait for each other, as the ranks of a process group do.

    Args:
        tasks: one a child.
        deadline_s: seconds that all of them have.
        grace_s: seconds that the others have when one has died or left garbage: what they wait for does not come.

    Returns:
        The outcomes in the order of `tasks`. No child runs any more, but for what the kernel does not let die. Where
        one could not be started (no memory, no room in the temporary directory), all have died of that.
    """
    return run_groups([tasks], deadline_s=deadline_s, grace_s=grace_s)[0]


def run_groups(groups: Sequence[Sequence[Task]], *, deadline_s: float, grace_s: float = 5.0) -> list[list[Outcome]]:
    """Run several groups of children at the same time; what ends one group early does not touch the others.

    Args:
        groups: the tasks of each group, whose children wait for each other.
        deadline_s, grace_s: see `run_together`.

    Returns:
        The outcomes of each group, see `run_together`.
    """
    with contextlib.ExitStack() as stack:
        try:
            running = [_Group([stack.enter_context(Child(task)) for task in group]) for group in groups]
        except OSError as error:
            why = f"{type(error).__name__}: it could not be started: {error.strerror or error}"
            return [[Outcome(status="died", error=why) for _ in group] for group in groups]
        ends_at = time.monotonic() + deadline_s
        for group in running:
            group.ends_at = ends_at
        while sum(group.watch(grace_s) for group in running):
            time.sleep(_POLL_SECONDS)
        return [[child.outcome(late=child in group.late) for child in group.children] for group in running]


class _Group:
    """Children that wait for each other."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children
        self.late: list[Child] = []
        self.ends_at = 0.0
        self._one_failed = False
        self._asked_at: float | None = None

    def watch(self, grace_s: float) -> bool:
        """Look at the children once: whether any still runs. The late are asked where they stand, then killed."""
        running = [child for child in self.children if child.runs()]
        now = time.monotonic()
        if not running:
            return False
        if self._asked_at is not None:
            if now < self._asked_at + _STACK_SECONDS:
                return True
            Child.kill_all(running)
            return False
        if not self._one_failed and any(child.failed() for child in self.children):
            self._one_failed, self.ends_at = True, min(self.ends_at, now + grace_s)
        if now >= self.ends_at:
            self.late, self._asked_at = running, now
            for child in running:
                child.ask_where()
        return True
