"""Machines and what the doctor is to find on each: the row's names, without those of status ``ok``.

The trees are built by ``tests.hardware.trees``, which names where their forms come from; what is installed comes from
``stacks``. What each machine stands for is in its source line, with the report that it follows.
"""

from __future__ import annotations

from tests.doctor.machines_hardware import HARDWARE
from tests.doctor.machines_software import SOFTWARE

MACHINES = {**HARDWARE, **SOFTWARE}
