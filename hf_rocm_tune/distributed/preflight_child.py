"""A child of the preflight: ``python -m hf_rocm_tune.distributed.preflight_child pair|rank``, the request on stdin."""

from __future__ import annotations

import sys
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import answer, step

PAIR, RANK = "pair", "rank"
IMPORTING = "importing torch"
"""The step of a child that has not begun to measure yet."""


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what the command line names.

    Raises:
        UsageError: it names neither.
    """
    if sys.argv[1:] not in ([PAIR], [RANK]):
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give {PAIR} or {RANK}")
    step(IMPORTING)
    from hf_rocm_tune.distributed import preflight_pairs, preflight_ranks

    return (preflight_pairs if sys.argv[1] == PAIR else preflight_ranks).measure(request)


if __name__ == "__main__":
    sys.exit(answer(measure))
