"""Makes a command run on a machine that was built as a recording: only what reads the machine is replaced.

``PRETENDED_MACHINE`` names a JSON file::

    {"recording": {...}, "software": {"hip": "7.2.26015", "torch": "...", "archs": [...]} or null,
     "address": PCI address of the card that the process is to take its device for, or null,
     "hangs": whether each read of the machine lasts for ever, "deadline_s": seconds or null}
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_rocm_tune.machine.software import Software, TorchDevice
from hf_rocm_tune.machine.sysfs import Reading, RecordedTree, Tree


class _Hanging(RecordedTree):
    """A driver that does not answer."""

    def read(self, path: str, limit: int) -> bytes:
        time.sleep(3600)
        return super().read(path, limit)


def pretend(file: str) -> None:
    """Replace the readers of this process by those of the machine in ``file``."""
    from hf_rocm_tune.job import announce as machine_findings
    from hf_rocm_tune.train import telemetry

    wanted: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    tree: Tree = (_Hanging if wanted["hangs"] else RecordedTree)(wanted["recording"])
    survey, read_software, check_machine = (
        machine_findings.survey,
        machine_findings.read_software,
        machine_findings.check_machine,
    )
    machine_findings.survey = lambda: survey(tree)
    if wanted["software"]:
        machine_findings.read_software = lambda **options: _as_on(wanted["software"], read_software(**options))
    if wanted["deadline_s"]:
        machine_findings.check_machine = lambda **options: check_machine(**options, deadline_s=wanted["deadline_s"])
    if wanted["address"]:
        telemetry.card_of = lambda device: (wanted["address"], "")
        telemetry.LiveTree = lambda: tree


def _as_on(machine: dict[str, Any], here: Software) -> Software:
    """This installation with another build of torch."""
    devices = tuple(TorchDevice(index=number, **device) for number, device in enumerate(machine["devices"]))
    return replace(
        here,
        torch_version=Reading(value=machine["torch"]),
        hip_version=machine["hip"],
        arch_list=Reading(value=tuple(machine["archs"])),
        devices=Reading(value=devices),
    )
