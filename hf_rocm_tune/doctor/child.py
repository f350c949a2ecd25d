"""A measured check's child process: ``python -m hf_rocm_tune.doctor.measured NAME``.

How it is run, and what it can do to us (nothing), is the matter of ``hardware.child``, which the preflight before a run
on several cards uses as well; here is only which module measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.machine.child import Outcome, Task, run_together

MODULE = "hf_rocm_tune.doctor.measured"

__all__ = ["MODULE", "Outcome", "measure_in_child"]


def measure_in_child(
    name: str,
    request: Mapping[str, Any],
    *,
    deadline_s: float,
    environ: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Let a child measure.

    Args:
        name: module in ``doctor/measured/`` that has ``measure(request) -> dict``.
        request: plain JSON values, see that module.
        deadline_s: seconds, starting Python and importing torch included.
        environ: variables beside those of this process, None to take one away (cold runs with other settings).
    """
    task = Task(module=MODULE, arguments=(name,), request=request, environ=environ or {})
    return run_together([task], deadline_s=deadline_s)[0]
