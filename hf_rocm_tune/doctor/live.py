"""Reads this machine: the kernel's files, the software, and the user's variables. Imports no torch itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_rocm_tune.doctor.evidence import Evidence
from hf_rocm_tune.machine.software import DEADLINE_S, read_software
from hf_rocm_tune.machine.survey import record
from hf_rocm_tune.machine.variables import MARK_SET
from hf_rocm_tune.machine.visible import users_environ


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables as the user has them: without what this package, or a parent process of it, has set."""
    ours = {name for name in environ.get(MARK_SET, "").split(",") if name}
    return {name: value for name, value in users_environ(environ).items() if name not in ours and name != MARK_SET}


def read_here(*, deadline_s: float = DEADLINE_S) -> tuple[Evidence, dict[str, Any]]:
    """What this machine is, and the recording of what was read of it.

    Args:
        deadline_s: seconds that torch has to answer.
    """
    machine, recording = record()
    software = read_software(deadline_s=deadline_s)
    return Evidence(machine=machine, software=software, environ=own_environ(os.environ)), recording
