"""Checks that only read. Each module lists its own; here they come together, in the order in which they run."""

from __future__ import annotations

from hf_rocm_tune.doctor.check import Check
from hf_rocm_tune.doctor.checks import access, cards, host, kernel, libraries, pcie, torch_build, variables

READ_CHECKS: tuple[Check, ...] = (
    *access.CHECKS,
    *cards.CHECKS,
    *variables.CHECKS,
    *torch_build.CHECKS,
    *libraries.CHECKS,
    *kernel.CHECKS,
    *pcie.CHECKS,
    *host.CHECKS,
)
