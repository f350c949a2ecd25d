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

from hf_rocm_tune.hardware.child_process import Child
from hf_rocm_tune.hardware.child_record import Outcome, Task

__all__ = ["Outcome", "Task", "run", "run_together"]

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
    with contextlib.ExitStack() as stack:
        try:
            children = [stack.enter_context(Child(task)) for task in tasks]
        except OSError as error:
            why = f"{type(error).__name__}: it could not be started: {error.strerror or error}"
            return [Outcome(status="died", error=why) for _ in tasks]
        ends_at = time.monotonic() + deadline_s
        one_failed = False
        while (late := [child for child in children if child.runs()]) and time.monotonic() < ends_at:
            if not one_failed and any(child.failed() for child in children):
                one_failed, ends_at = True, min(ends_at, time.monotonic() + grace_s)
            time.sleep(_POLL_SECONDS)
        for child in late:
            child.ask_where()
        if late:
            time.sleep(_STACK_SECONDS)
        for child in children:
            child.kill()
        return [child.outcome(late=child in late) for child in children]
