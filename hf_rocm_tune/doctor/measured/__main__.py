"""The child of a measured check: ``python -m hf_rocm_tune.doctor.measured NAME``, the request on stdin."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hf_rocm_tune.doctor.measured import MEASURED, PACKAGE
from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.machine.child import answer


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what the command line names.

    Raises:
        UsageError: it names no check that measures in a child of this module.
    """
    modules = sorted({one.module for one in MEASURED.values() if one.own_child})
    if len(sys.argv) != 2 or sys.argv[1] not in modules:
        raise UsageError(f"got {' '.join(sys.argv[1:]) or 'nothing'} to measure: give one of {' '.join(modules)}")
    result: dict[str, Any] = importlib.import_module(f"{PACKAGE}.{sys.argv[1]}").measure(request)
    return result


if __name__ == "__main__":
    sys.exit(answer(measure))
