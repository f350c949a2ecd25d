"""Measured checks: what is tried on the device itself, each in a child process with a deadline.

A check is a module here with two halves, and a line in the registry (``transfer.TRANSFER``, ``compute.COMPUTE``):

``measure(request) -> dict``
    the child's half; imports torch inside (or in a module beside it). ``request["device"]`` is ``cuda:0`` ... or
    ``cpu``; ``request["fault"]``, where it is there, is ``{"kind": ...}``, one of the check's own ``faults``. Faults of
    the process itself (hang, kill, garbage ...) are made by ``hardware.child_main``. It calls
    ``child_main.step("copying 64 MiB")`` before each part, so that a hang can be told by name.
``judge(outcome, request) -> list[Finding]``
    the parent's half; no torch. It is given only outcomes that are ``done``: a child that hung, died or left garbage is
    judged in one place for all (``conduct``).
``conduct(ask, request) -> list[Finding]``
    instead of ``judge``, where one child is not enough; see ``conduct.Ask``.

To try one by hand: ``echo '{"device": "cpu"}' | python -m hf_rocm_tune.doctor.measured NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_rocm_tune.doctor.measured.compute import COMPUTE
from hf_rocm_tune.doctor.measured.entry import Measured
from hf_rocm_tune.doctor.measured.transfer import TRANSFER

__all__ = ["MEASURED", "PACKAGE", "Measured"]

PACKAGE = "hf_rocm_tune.doctor.measured"

MEASURED: Mapping[str, Measured] = MappingProxyType({one.name: one for one in (*TRANSFER, *COMPUTE)})
"""All of them by name, in the order in which they run (``doctor.check.GROUPS``)."""
