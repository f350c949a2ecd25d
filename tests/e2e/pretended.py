"""Makes a command run on a machine that was written below a directory: only what reads the machine is replaced.

``PRETENDED_MACHINE`` names a JSON file::

    {"root": the directory, "process": fields of ``survey.Machine`` that are in no file,
     "software": {"hip": "7.2.26015", "torch": "...", "archs": [...]} or null,
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
from hf_rocm_tune.machine.survey import survey
from hf_rocm_tune.machine.sysfs import Files


def pretend(file: str) -> None:
    """Replace the readers of this process by those of the machine in ``file``."""
    from hf_rocm_tune.job import announce as machine_findings
    from hf_rocm_tune.train import telemetry

    wanted: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    root = Path(wanted["root"])
    read_software, check_machine = machine_findings.read_software, machine_findings.check_machine
    if wanted["hangs"]:  # a driver that does not answer
        machine_findings.survey = lambda: time.sleep(3600)
    else:
        machine_findings.survey = lambda: replace(survey(root), **wanted["process"])
    if wanted["software"]:
        machine_findings.read_software = lambda **options: _as_on(wanted["software"], read_software(**options))
    if wanted["deadline_s"]:
        machine_findings.check_machine = lambda **options: check_machine(**options, deadline_s=wanted["deadline_s"])
    if wanted["address"]:
        telemetry.card_of = lambda device: (wanted["address"], "")
        telemetry.Files = lambda: Files(root)


def _as_on(machine: dict[str, Any], here: Software) -> Software:
    """This installation with another build of torch."""
    devices = tuple(TorchDevice(index=number, **device) for number, device in enumerate(machine["devices"]))
    return replace(
        here,
        torch_version=machine["torch"],
        hip_version=machine["hip"],
        arch_list=tuple(machine["archs"]),
        devices=devices,
        missing_for_triton="",
        problems={},
    )
